// Puts two emulated cards under load from several threads, through XRT's C++ API, for sanitizers to watch.
// Usage: stress XCLBIN NUM_ROUNDS
#include <xrt/xrt_bo.h>
#include <xrt/xrt_device.h>
#include <xrt/xrt_kernel.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::uint32_t kBeats = 128;
constexpr std::size_t kBytes = std::size_t{kBeats} * 64;
constexpr std::size_t kNumbers = kBytes / sizeof(float);

void require(bool holds, const char* what) {
    if (!holds) throw std::runtime_error(what);
}

// One thread's buffers, and runs on them.
class Worker {
 public:
    Worker(xrt::device& device, const xrt::uuid& uuid, unsigned number)
        : random_(number),
          kernel_(device, uuid, "probe:{probe_" + std::to_string(1 + number % 2) + "}"),
          gradient_(device, kBytes, xrt::bo::flags::normal, 0),
          data_(device, kBytes, xrt::bo::flags::p2p, 0),
          parameter_(device, kBytes, xrt::bo::flags::normal, 0),
          // P2P, because XRT 2.13 allocates host memory for others by an aligned_alloc that sanitizers refuse.
          status_(device, 64, xrt::bo::flags::p2p, 0) {}

    void work(int rounds) {
        for (int round = 0; round < rounds; ++round) {
            fill(gradient_, 2);
            fill(data_, 1);
            gradient_.sync(XCL_BO_SYNC_BO_TO_DEVICE);
            random_() % 4 == 0 ? overrun() : compute();
        }
    }

 private:
    static void fill(xrt::bo& buffer, float value) {
        auto* numbers = buffer.map<float*>();
        for (std::size_t index = 0; index < kNumbers; ++index) numbers[index] = value;
    }

    ert_cmd_state run(std::uint32_t last) {
        xrt::run run(kernel_);
        int argument = 0;
        for (const xrt::bo* buffer : {&gradient_, &data_, &data_, &parameter_, &status_}) {
            run.set_arg(argument++, *buffer);
        }
        for (const std::uint32_t word : {0u, 0u, last, 0u, 0u, 0u, 0x3f000000u}) run.set_arg(argument++, word);
        run.start();
        return run.wait(10'000);
    }

    void compute() {
        const std::uint32_t last = random_() % (kBeats + 1);
        require(run(last) == ERT_CMD_STATE_COMPLETED, "a run did not complete");
        parameter_.sync(XCL_BO_SYNC_BO_FROM_DEVICE);
        const auto* parameters = parameter_.map<const float*>();
        const auto* data = data_.map<const float*>();
        for (std::size_t index = 0; index < std::size_t{last} * 16; ++index) {
            require(data[index] == 3 && parameters[index] == 1.5f, "a run computed something else");
        }
    }

    void overrun() { require(run(kBeats + 1) == ERT_CMD_STATE_ERROR, "a beat past its buffer went unseen"); }

    std::mt19937 random_;
    xrt::kernel kernel_;
    xrt::bo gradient_, data_, parameter_, status_;
};

void work_on(unsigned card, const char* xclbin, int rounds) {
    xrt::device device(card);
    const xrt::uuid uuid = device.load_xclbin(xclbin);
    std::vector<std::thread> threads;
    for (unsigned number = 0; number < 2; ++number) {
        threads.emplace_back([&, number] { Worker(device, uuid, 2 * card + number).work(rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%s %s\n", device.get_info<xrt::info::device::name>().c_str(),
                device.get_info<xrt::info::device::bdf>().c_str());
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 3) return 2;
    for (unsigned card = 0; card < 2; ++card) work_on(card, arguments[1], std::atoi(arguments[2]));
    std::thread first(work_on, 0, arguments[1], std::atoi(arguments[2]));
    std::thread second(work_on, 1, arguments[1], std::atoi(arguments[2]));
    first.join();
    second.join();
}
