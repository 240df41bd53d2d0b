// Carries random gradients through rings of random sizes and numbers of threads, on a device whose copies take their
// time or fail, and compares sums and squares with those of one call for each gradient. Built with sanitizers by
// test_builds.py.

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "cuda/gradient_ring.hpp"
#include "kernels/instruction_set.hpp"
#include "stress.hpp"

namespace smart_infinity {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr const char* kCalls[] = {"cuMemcpyDtoHAsync_v2", "cuEventRecord", "cuEventCreate", "cuStreamWaitEvent"};
constexpr std::size_t kMostNumel = 3000;

struct Parameter {
    std::size_t numel = 0;
    std::vector<std::byte> sum, expected;
    double squares = 0;
};

class Scenario {
 public:
    Scenario(std::uint64_t seed, const FakeCuda& cuda)
        : seed_(seed), random_(seed), cuda_(cuda), dtype_(kDTypes[random_.upto(2)]) {
        cuda_.reset();
        GradientRing::Options options{};
        options.slot_bytes = 64 * random_.between(2, 40);
        options.num_slots = random_.between(1, 6);
        options.num_threads = random_.between(1, 4);
        options.most_bytes = 1 << random_.between(6, 16);
        ring_ = std::make_shared<GradientRing>(device_, options);
        parameters_.resize(random_.between(1, 5));
        for (Parameter& parameter : parameters_) {
            parameter.numel = random_.between(1, kMostNumel);
            parameter.sum.resize(parameter.numel * item_bytes(dtype_));
            parameter.expected.resize(parameter.sum.size());
        }
    }

    void run() {
        for (int window = 0; window < 3; ++window) {
            cuda_.delay(seed_ + static_cast<std::uint64_t>(window), 200);
            const bool fails = random_.one_in(4);
            const std::size_t number = random_.upto(20);
            if (fails) cuda_.fail(kCalls[random_.upto(3)], static_cast<int>(number), 2);
            send_window();
            check_window(fails);
            cuda_.reset();
            ring_->reset();
            sources_.clear();
        }
    }

 private:
    void send_window() {
        const std::size_t num_rounds = random_.between(1, 3);
        for (std::size_t round = 0; round < num_rounds; ++round) {
            for (std::size_t key = 0; key < parameters_.size(); ++key) send(key, round > 0);
        }
    }

    void send(std::size_t key, bool adds) {
        Parameter& parameter = parameters_[key];
        const DType dtype = kDTypes[random_.upto(2)];
        std::vector<float> values(parameter.numel);
        random_.fill(values);
        sources_.emplace_back(parameter.numel * item_bytes(dtype));
        std::byte* const source = sources_.back().data();
        kernels().narrow[static_cast<std::size_t>(dtype)](values.data(), source, parameter.numel);
        SquareSums sums{};
        const auto add = kernels().accumulate[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(dtype_)];
        parameter.squares = add(source, parameter.expected.data(), parameter.numel, adds, &sums);
        ring_->push(
            {key, reinterpret_cast<Address>(source), parameter.numel, dtype, parameter.sum.data(), dtype_, adds},
            stream_.handle());
    }

    void check_window(bool may_fail) {
        const GradientRing::Ticket ticket = ring_->pushed();
        const GradientsArrived arrived(ring_, ticket);
        bool failed[2] = {};
        const auto wait = [&](bool& has_failed) {
            try {
                arrived.synchronize();
            } catch (const CudaError&) {
                has_failed = true;
            }
        };
        std::thread other([&] { wait(failed[1]); });
        wait(failed[0]);
        other.join();
        require(ring_->done(ticket), "a gradient is still on its way", seed_);
        require(may_fail || !(failed[0] || failed[1]), "a wait failed", seed_);
        for (const Parameter& parameter : parameters_) record(parameter.expected.data(), parameter.expected.size());
        if (failed[0]) return;
        for (const auto& [key, squares] : ring_->take_squares()) found_[key] = squares;
        for (std::size_t key = 0; key < parameters_.size(); ++key) {
            const Parameter& parameter = parameters_[key];
            require(parameter.sum == parameter.expected, "a sum differs", seed_);
            require(found_[key] == parameter.squares, "squares differ", seed_);
        }
    }

    std::uint64_t seed_;
    Random random_;
    const FakeCuda& cuda_;
    DType dtype_;
    std::shared_ptr<CudaDevice> device_ = std::make_shared<CudaDevice>(0);
    CudaStream stream_{device_};
    std::shared_ptr<GradientRing> ring_;
    std::vector<Parameter> parameters_;
    std::vector<std::vector<std::byte>> sources_;
    double found_[5] = {};
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    using namespace smart_infinity;
    const FakeCuda cuda(argv[argc - 1]);
    return run_scenarios(argc, argv, [&](std::uint64_t seed) { Scenario(seed, cuda).run(); });
}
