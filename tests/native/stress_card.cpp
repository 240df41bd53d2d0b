// Works many tiny batches by a card in this process (fake_card.hpp), with the kernels of hls/, and the same batches by
// the host, and compares every parameter and every byte on storage. The card hangs, fails and flips bits, and the
// host then does the work that the card has not done. Some reads and writes of its files block until they are released.
// Built with sanitizers by test_builds.py.

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "card/card_kernel.hpp"
#include "card/card_updater.hpp"
#include "fake_card.hpp"
#include "pipeline/pipeline.hpp"
#include "stress.hpp"

namespace {

// A released call returns within this time, also under a sanitizer and on a busy machine.
constexpr std::chrono::seconds kLongestWait{120};

// Blocks a transfer of one file until open().
class Gate {
 public:
    // Blocks the transfer of the file in this direction with this number, counted from now on.
    void hold(int descriptor, bool writes, int at) {
        const std::lock_guard lock(mutex_);
        descriptor_ = descriptor;
        writes_ = writes;
        at_ = at;
        happened_ = false;
    }
    bool happened() {
        const std::lock_guard lock(mutex_);
        return happened_;
    }
    void open() {
        const std::lock_guard lock(mutex_);
        descriptor_ = -1;
        changed_.notify_all();
    }
    void pass(int descriptor, bool writes) {
        std::unique_lock lock(mutex_);
        if (descriptor != descriptor_ || writes != writes_ || at_-- != 0) return;
        happened_ = true;
        changed_.wait(lock, [this] { return descriptor_ == -1; });
    }

 private:
    std::mutex mutex_;
    std::condition_variable changed_;
    int descriptor_ = -1;
    bool writes_ = false;
    int at_ = 0;
    bool happened_ = false;
};

Gate& gate() {
    static Gate* const gate = new Gate;  // never destroyed: a blocked transfer may continue at exit
    return *gate;
}

}  // namespace

// These replace libc's functions in the whole program.
extern "C" ssize_t pread(int descriptor, void* data, std::size_t bytes, off_t offset) {
    gate().pass(descriptor, false);
    return ::syscall(SYS_pread64, descriptor, data, bytes, offset);
}

extern "C" ssize_t pwrite(int descriptor, const void* data, std::size_t bytes, off_t offset) {
    gate().pass(descriptor, true);
    return ::syscall(SYS_pwrite64, descriptor, data, bytes, offset);
}

namespace smart_infinity {
namespace {

using fake::CardFault;

struct Rule {
    const char* kernel;
    std::size_t num_arrays;
    std::vector<UpdateStep> steps;
};

const Rule kRules[] = {
    {"adamw_update",
     3,
     {AdamStep{0.5f, 0.1f, 0.999f, 0.001f, 0.9999f, 0.0f, 1e-2f, 3.0f, 1e-8f, 0},
      AdamStep{1.0f, 0.7f, 0.99f, 0.01f, 1.0f, 0.1f, 1e-3f, 2.0f, 1e-6f, 0}}},
    {"adagrad_update", 2, {AdagradStep{0.5f, 0.1f, 1e-2f, 0.0f}, AdagradStep{1.0f, 0.0f, 1e-3f, 1e-10f}}},
    {"sgd_update", 2, {SgdStep{0.5f, 0.1f, 0.9f, 0.7f, 0.9f, 1e-2f}, SgdStep{1.0f, 0.0f, 0.0f, 1.0f, 0.0f, 1e-3f}}},
    {"rmsprop_update",
     4,
     {RmspropStep{0.5f, 0.1f, 0.99f, 0.01f, 1e-8f, 0.9f, 0.0f, 1e-2f},
      RmspropStep{1.0f, 0.0f, 0.3f, 0.7f, 1e-6f, 0.0f, 1.0f, 1e-3f}}},
};

// A file with two places for each tasklet, and the parameters that come from it.
struct Side {
    StateFile file;
    std::string path;
    std::vector<float> parameters;  // each takes four bytes, whatever its type
};

class Scenario {
 public:
    Scenario(const std::string& folder, std::uint64_t seed)
        : seed_(seed), random_(seed), rule_(kRules[seed % std::size(kRules)]), folder_(folder) {
        const std::size_t kind = random_.upto(3);
        numel_ = kind == 0 ? random_.between(1, 100) : kind == 1 ? random_.between(1, 5000) : random_.between(1, 40000);
        if (seed % 10 == 0) numel_ = random_.between(65530, 65600);
        const std::size_t num_tasklets = seed % 10 == 0 ? 1 : random_.between(1, 7);
        tasklet_numel_ = (numel_ + num_tasklets - 1) / num_tasklets;
        num_tasklets_ = (numel_ + tasklet_numel_ - 1) / tasklet_numel_;
        through_file_ = random_.coin();
        host_ = std::make_unique<Side>(make_side("host"));
        card_ = std::make_unique<Side>(make_side("card"));
        gradients_.resize(numel_);
        on_host_ = make_host_pipeline(*host_);
        on_card_ = make_card_pipeline();
    }

    void run() {
        initialize();
        for (std::size_t round = random_.between(1, 3); round > 0; --round) update();
        close_in_flight();
    }

 private:
    std::size_t extent_of(std::size_t numel) const {
        return extent_bytes(Regions(kFp32, rule_.num_arrays, numel, Blocks::grid()));
    }
    std::size_t extent() const { return extent_of(tasklet_numel_); }

    Side make_side(const char* name) {
        const std::string path = make_file(folder_, name, 2 * num_tasklets_ * extent(), seed_);
        return {StateFile(path, Access::kBuffered), path, std::vector<float>(numel_)};
    }

    std::unique_ptr<Pipeline> make_host_pipeline(const Side& side) {
        PipelineOptions options{{side.file}, Identity{{1}, 0, 0}, 2, extent()};
        options.io_engine = IoEngineKind::kThreads;
        return std::make_unique<Pipeline>(std::move(options));
    }

    std::unique_ptr<Pipeline> make_card_pipeline() {
        core_ = std::make_shared<fake::Core>();
        PipelineOptions options{{card_->file}, Identity{{1}, 0, 0}, random_.between(1, 4), extent()};
        options.io_threads = random_.between(1, 3);
        options.compute_threads = random_.between(1, 3);
        CardOptions card{std::make_shared<fake::Binding>(core_), rule_.kernel,
                         align_up(8 * tasklet_numel_ + 1024, 4096), 4 * tasklet_numel_,
                         std::chrono::milliseconds(10000)};
        if (through_file_) {
            const std::size_t bytes = options.num_buffers * card.gradient_buffer_bytes;
            const std::string path = make_file(folder_, "gradients", bytes, seed_);
            card.gradient_file = StateFile(path, Access::kBuffered);
            ::unlink(path.c_str());
            gradients_descriptor_ = card.gradient_file->descriptor();
        }
        if (is_impatient()) card.timeout = std::chrono::milliseconds(20);
        return std::make_unique<Pipeline>(with_card(std::move(options), std::move(card)));
    }

    Tasklet tasklet(std::size_t index) const {
        Tasklet tasklet;
        tasklet.index = index;
        tasklet.numel = std::min(tasklet_numel_, numel_ - index * tasklet_numel_);
        tasklet.num_arrays = rule_.num_arrays;
        tasklet.extent_bytes = extent_of(tasklet.numel);
        tasklet.read_offset = (2 * index + place_) * extent();
        tasklet.write_offset = (2 * index + (1 - place_)) * extent();
        tasklet.read_generation = generation_;
        tasklet.write_generation = generation_ + 1;
        return tasklet;
    }

    // Whether the timeout is so short that a slow run or transfer may be abandoned.
    bool is_impatient() const { return seed_ % 4 == 3; }

    // Draws bits that are finite numbers in every type.
    void draw_gradients() {
        for (float& value : gradients_) {
            std::uint16_t halves[2];
            for (std::uint16_t& half : halves) {
                half = static_cast<std::uint16_t>(random_.between(0x3000, 0x3bff) | (random_.upto(1) << 15));
            }
            std::memcpy(&value, halves, sizeof value);
        }
    }

    void initialize() {
        std::vector<std::vector<float>> arrays(rule_.num_arrays, std::vector<float>(numel_));
        for (auto& array : arrays) {
            for (float& value : array) value = random_.upto(20) == 0 ? 1e-41f : std::abs(random_.normal());
        }
        Batch batch{Operation::kWrite, {}, {}, nullptr};
        for (std::size_t index = 0; index < num_tasklets_; ++index) {
            batch.tasklets.push_back(tasklet(index));
            Segment segment;
            segment.numel = batch.tasklets.back().numel;
            segment.num_arrays = rule_.num_arrays;
            for (std::size_t array = 0; array < rule_.num_arrays; ++array) {
                segment.arrays[array] = reinterpret_cast<Address>(arrays[array].data() + index * tasklet_numel_);
            }
            batch.tasklets.back().segments.push_back(segment);
        }
        for (Side* side : {host_.get(), card_.get()}) {
            auto pipeline = make_host_pipeline(*side);
            pipeline->submit(batch);
            require(!pipeline->finish(), "the first write failed", seed_);
        }
        commit();
    }

    void commit() {
        place_ = 1 - place_;
        ++generation_;
    }

    void update() {
        draw_gradients();
        const Batch batch = update_batch();
        on_host_->submit(on(batch, *host_));
        require(!on_host_->finish(), "the host failed", seed_);
        inject();
        on_card_->submit(on(batch, *card_));
        const auto failure = on_card_->finish();
        if (!gate().happened()) gate().open();
        require(!failure || is_impatient() || fault_ != CardFault::kNone, "the card failed by itself", seed_);
        require(failure || !gate().happened(), "a transfer that did not return was lost", seed_);
        require(!failure || failure->kind == FailureKind::kDevice, "a failure is of another kind", seed_);
        require(failure || !core_->happened() || may_be_harmless(), "a failure was lost", seed_);
        if (failure) redo(batch);
        compare();
        commit();
    }

    // Lets the host do, from the old places in the card's file, the tasklets that the card has not completed.
    void redo(Batch batch) {
        check_busy();
        const std::vector<std::size_t> finished = on_card_->complete();
        for (auto position = finished.rbegin(); position != finished.rend(); ++position) {
            batch.tasklets.erase(batch.tasklets.begin() + static_cast<std::ptrdiff_t>(*position));
        }
        require(!batch.tasklets.empty(), "a failed batch is wholly done", seed_);
        auto pipeline = make_host_pipeline(*card_);
        pipeline->submit(on(batch, *card_));
        require(!pipeline->finish(), "the second attempt failed", seed_);
    }

    void check_busy() {
        const bool hangs = fault_ == CardFault::kHang || fault_ == CardFault::kStalledSync;
        if ((hangs && core_->happened()) || gate().happened()) {
            require(on_card_->busy(), "what hangs is taken for returned", seed_);
            try {
                on_card_->submit(Batch{});
                require(false, "a busy card takes a batch", seed_);
            } catch (const std::invalid_argument&) {
                core_->release();
                gate().open();
            }
        }
        const auto deadline = std::chrono::steady_clock::now() + kLongestWait;
        while (on_card_->busy() && std::chrono::steady_clock::now() < deadline) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        require(!on_card_->busy(), "what was let go has not returned", seed_);
    }

    void inject() {
        constexpr CardFault kFaults[] = {CardFault::kHang,          CardFault::kError,       CardFault::kAbort,
                                         CardFault::kNoStatus,      CardFault::kOtherArray,  CardFault::kOtherParameter,
                                         CardFault::kOtherGradient, CardFault::kFailedStart, CardFault::kFailedSync,
                                         CardFault::kStalledSync};
        fault_ = random_.coin() ? kFaults[random_.upto(std::size(kFaults) - 1)] : CardFault::kNone;
        const bool hangs = fault_ == CardFault::kHang || fault_ == CardFault::kStalledSync;
        if (hangs && !is_impatient()) fault_ = CardFault::kError;
        core_->inject(fault_, static_cast<int>(random_.upto(4)));
        const bool holds = is_impatient() && fault_ == CardFault::kNone && random_.coin();
        hold(holds, static_cast<int>(random_.upto(3)));
    }

    // Blocks a transfer of state or of gradients, or none.
    void hold(bool holds, int at) {
        const bool of_gradients = through_file_ && random_.coin();
        const int descriptor = of_gradients ? gradients_descriptor_ : card_->file.descriptor();
        gate().hold(holds ? descriptor : -1, random_.coin(), at);
    }

    // These faults have no effect on a run without a gradient or without parameters.
    bool may_be_harmless() const { return fault_ == CardFault::kOtherGradient || fault_ == CardFault::kOtherParameter; }

    // Compares the parameters and the written extents.
    void compare() {
        require(std::memcmp(host_->parameters.data(), card_->parameters.data(), 4 * numel_) == 0, "a parameter differs",
                seed_);
        require(content(*host_) == content(*card_), "storage differs", seed_);
    }

    std::vector<char> content(const Side& side) const {
        std::vector<char> content(num_tasklets_ * extent());
        for (std::size_t index = 0; index < num_tasklets_; ++index) {
            const auto offset = static_cast<off_t>((2 * index + (1 - place_)) * extent());
            const ssize_t read = ::pread(side.file.descriptor(), content.data() + index * extent(), extent(), offset);
            require(read == static_cast<ssize_t>(extent()), "storage cannot be read", seed_);
        }
        return content;
    }

    // Gives parameters as offsets. on() adds the address.
    Batch update_batch() {
        Batch batch{Operation::kUpdate, {}, rule_.steps, nullptr};
        payloads_.clear();
        for (std::size_t index = 0; index < num_tasklets_; ++index) {
            Tasklet added = tasklet(index);
            const bool is_compressed = random_.coin();
            const auto dtype = static_cast<DType>(random_.upto(2));
            if (is_compressed) compress(added, dtype);
            for (std::size_t offset = 0; offset < added.numel;) {
                if (random_.upto(4) == 0) offset += random_.between(1, 70);
                if (offset >= added.numel) break;
                const std::size_t numel = std::min<std::size_t>(random_.between(1, 9000), added.numel - offset);
                add_segment(added, offset, numel, dtype, is_compressed);
                offset += numel;
            }
            batch.tasklets.push_back(std::move(added));
        }
        return batch;
    }

    void add_segment(Tasklet& tasklet, std::size_t offset, std::size_t numel, DType dtype, bool is_compressed) {
        const std::size_t first = tasklet.index * tasklet_numel_ + offset;
        Segment segment;
        segment.offset = offset;
        segment.numel = numel;
        segment.step = static_cast<std::int64_t>(random_.upto(2)) - 1;
        segment.gradient_dtype = is_compressed || random_.coin() ? dtype : DType::kFloat32;
        if (!is_compressed) segment.gradient = reinterpret_cast<Address>(gradients_.data() + first);
        segment.parameter_dtype = static_cast<DType>(random_.upto(2));
        if (random_.upto(5) > 0) segment.parameter = 4 * first + 1;
        tasklet.segments.push_back(segment);
    }

    static Batch on(Batch batch, Side& side) {
        for (Tasklet& tasklet : batch.tasklets) {
            for (Segment& segment : tasklet.segments) {
                if (segment.parameter == 0) continue;
                segment.parameter += reinterpret_cast<Address>(side.parameters.data()) - 1;
            }
        }
        return batch;
    }

    void compress(Tasklet& tasklet, DType dtype) {
        std::vector<std::uint32_t> header(16), counts((tasklet.numel + 65535) / 65536);
        std::vector<std::uint16_t> indices;
        const std::size_t most = random_.between(0, 8);
        for (std::size_t element = 0; element < tasklet.numel; ++element) {
            if (random_.upto(8) > most) continue;
            ++counts[element / 65536];
            indices.push_back(static_cast<std::uint16_t>(element % 65536));
        }
        const std::size_t values = align_up(indices.size() * item_bytes(dtype), 64);
        header = {0x4749534c,
                  1,
                  static_cast<std::uint32_t>(tasklet.numel),
                  static_cast<std::uint32_t>(counts.size()),
                  static_cast<std::uint32_t>(indices.size()),
                  static_cast<std::uint32_t>(dtype),
                  static_cast<std::uint32_t>(align_up(4 * counts.size(), 64) / 64),
                  static_cast<std::uint32_t>(align_up(2 * indices.size(), 64) / 64),
                  static_cast<std::uint32_t>(values / 64)};
        header.resize(16);
        std::vector<std::byte> payload;
        append(payload, header.data(), 64);
        append(payload, counts.data(), 4 * counts.size());
        append(payload, indices.data(), 2 * indices.size());
        append(payload, gradients_.data(), indices.size() * item_bytes(dtype));
        payloads_.push_back(std::move(payload));
        tasklet.payload = reinterpret_cast<Address>(payloads_.back().data());
        tasklet.payload_bytes = payloads_.back().size();
    }

    static void append(std::vector<std::byte>& payload, const void* data, std::size_t bytes) {
        const std::size_t at = payload.size();
        payload.resize(at + align_up(bytes, 64));
        if (bytes > 0) std::memcpy(payload.data() + at, data, bytes);
    }

    // Closes a pipeline with work in flight, even with a run that does not return.
    void close_in_flight() {
        const bool hangs = is_impatient() && random_.coin();
        const bool stalls = hangs && random_.coin();
        core_->inject(stalls ? CardFault::kStalledSync : hangs ? CardFault::kHang : CardFault::kNone, 0);
        hold(is_impatient() && !hangs && random_.coin(), 0);
        draw_gradients();
        const Batch batch = update_batch();
        on_card_->submit(on(batch, *card_));
        if (random_.coin()) std::this_thread::sleep_for(std::chrono::microseconds(random_.upto(300)));
        on_card_->close();
        core_->release();
        gate().open();
        for (const Side* side : {host_.get(), card_.get()}) ::unlink(side->path.c_str());
    }

    const std::uint64_t seed_;
    Random random_;
    const Rule& rule_;
    const std::string folder_;
    std::size_t numel_ = 0;
    std::size_t num_tasklets_ = 0;
    std::size_t tasklet_numel_ = 0;
    bool through_file_ = false;
    int gradients_descriptor_ = -1;
    CardFault fault_ = CardFault::kNone;
    std::size_t place_ = 0;
    std::uint64_t generation_ = 0;
    std::vector<float> gradients_;
    std::vector<std::vector<std::byte>> payloads_;
    std::unique_ptr<Side> host_;
    std::unique_ptr<Side> card_;
    std::shared_ptr<fake::Core> core_;
    std::unique_ptr<Pipeline> on_host_;
    std::unique_ptr<Pipeline> on_card_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    return smart_infinity::run_scenarios(argc, argv,
                                         [argv](std::uint64_t seed) { smart_infinity::Scenario(argv[1], seed).run(); });
}
