// Works many tiny batches through a Pipeline, under random sizes, threads, delays, short transfers and failures, and
// compares every bit with a plain loop. Built with sanitizers by test_builds.py.
//
// Some tasklets are resident, in every third scenario in memory only. In every other scenario parameters are on the
// fake CUDA device of fake_cuda.cpp, whose copies take their time or fail. Six scenarios of one update rule are
// followed by six of the next.

#include "stress.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "base/buffer.hpp"
#include "base/flush_subnormals.hpp"
#include "base/system_error.hpp"
#include "busy_handlers.hpp"
#include "cuda/cuda_device.hpp"
#include "io/io_scheduler.hpp"
#include "pipeline/pipeline.hpp"
#include "testing/fault_injection.hpp"

namespace smart_infinity {
namespace {

constexpr int kCudaOutOfMemory = 2;

struct State {
    std::vector<std::vector<float>> arrays;
    bool operator==(const State& other) const { return arrays == other.arrays; }
};

// Two steps of each update rule. A scenario uses one rule.
const std::vector<UpdateStep> kSteps[] = {
    {AdamStep{0.5f, 0.1f, 0.999f, 0.001f, 0.9999f, 0.0f, 1e-2f, 3.0f, 1e-8f, 0},
     AdamStep{1.0f, 0.7f, 0.99f, 0.01f, 1.0f, 0.1f, 1e-3f, 2.0f, 1e-6f, 0}},
    {AdagradStep{0.5f, 0.0f, 1e-2f, 1e-10f}, AdagradStep{-1.0f, 0.1f, 1e-3f, 1e-6f}},
    {SgdStep{0.5f, 0.0f, 0.9f, 0.7f, 0.9f, 1e-2f}, SgdStep{-1.0f, 0.1f, 0.0f, 1.0f, 0.0f, 1e-3f}},
    {RmspropStep{0.5f, 0.0f, 0.99f, 0.01f, 1e-8f, 0.9f, 0.0f, 1e-2f},
     RmspropStep{-1.0f, 0.1f, 0.3f, 0.7f, 1e-6f, 0.0f, 1.0f, 1e-3f}},
};

void update_element(const AdamStep& s, float gradient, State& state, std::size_t i) {
    float& p = state.arrays[0][i];
    float& m = state.arrays[1][i];
    float& v = state.arrays[2][i];
    float g = gradient * s.gradient_scale;
    if (s.l2 != 0) g = g + s.l2 * p;
    m = s.one_minus_beta1 < 0.5f ? m + s.one_minus_beta1 * (g - m) : g - (g - m) * (1 - s.one_minus_beta1);
    v = v * s.beta2 + (s.one_minus_beta2 * g) * g;
    p = p * s.decay;
    p = p - s.step_size * (m / (std::sqrt(v) * s.inverse_sqrt_bias_correction2 + s.eps));
}

void update_element(const AdagradStep& s, float gradient, State& state, std::size_t i) {
    float& p = state.arrays[0][i];
    float& sum = state.arrays[1][i];
    float g = gradient * s.gradient_scale;
    if (s.weight_decay != 0) g = g + s.weight_decay * p;
    sum = sum + g * g;
    p = p - s.step_size * (g / (std::sqrt(sum) + s.eps));
}

void update_element(const SgdStep& s, float gradient, State& state, std::size_t i) {
    float& p = state.arrays[0][i];
    float& buffer = state.arrays[1][i];
    float g = gradient * s.gradient_scale;
    if (s.weight_decay != 0) g = g + s.weight_decay * p;
    buffer = (s.buffer_coefficient != 0 ? s.buffer_coefficient * buffer : 0) + s.gradient_coefficient * g;
    p = p - s.lr * (s.nesterov_momentum != 0 ? g + s.nesterov_momentum * buffer : buffer);
}

void update_element(const RmspropStep& s, float gradient, State& state, std::size_t i) {
    float& p = state.arrays[0][i];
    float& square = state.arrays[1][i];
    float& buffer = state.arrays[2][i];
    float& mean = state.arrays[3][i];
    float g = gradient * s.gradient_scale;
    if (s.weight_decay != 0) g = g + s.weight_decay * p;
    square = square * s.alpha + (s.one_minus_alpha * g) * g;
    float variance = square;
    if (s.centered != 0) {
        const float gap = g - mean;
        mean = s.one_minus_alpha < 0.5f ? mean + s.one_minus_alpha * gap : g - gap * (1 - s.one_minus_alpha);
        variance = square - mean * mean;
    }
    float change = g / (std::sqrt(variance) + s.eps);
    if (s.momentum != 0) change = buffer = s.momentum * buffer + change;
    p = p - s.lr * change;
}

// A partition on storage, two places per tasklet, and the same state in memory.
class Scenario {
 public:
    Scenario(const std::string& folder, std::uint64_t seed, const FakeCuda& cuda,
             std::shared_ptr<IoScheduler> scheduler)
        : seed_(seed),
          scheduler_(std::move(scheduler)),
          steps_(kSteps[seed / 6 % std::size(kSteps)]),
          cuda_(cuda),
          random_(seed),
          numel_(random_.coin() ? random_.between(1, 500) : random_.between(1, 30000)) {
        num_tasklets_ = random_.between(1, 7);
        tasklet_numel_ = (numel_ + num_tasklets_ - 1) / num_tasklets_;
        num_tasklets_ = (numel_ + tasklet_numel_ - 1) / tasklet_numel_;
        place_.assign(num_tasklets_, 0);
        num_resident_ = random_.upto(num_tasklets_);
        in_memory_only_ = seed % 3 == 2;
        master_in_parameter_ = random_.coin();
        expected_.arrays.assign(rule_of(steps_.front()).num_arrays, std::vector<float>(numel_));
        parameters_.resize(numel_);
        gradients_.resize(numel_);
        for (std::size_t file = random_.between(1, 2); file > 0; --file) open(folder);
        cuda_.reset();
        if (seed % 2 == 1) stream_ = std::make_shared<CudaStream>(std::make_shared<CudaDevice>(0));
        pipeline_ = make_pipeline();
    }

    void run() {
        initialize();
        for (std::size_t round = random_.between(1, 4); round > 0; --round) {
            inject(round);
            update();
        }
        check_state();
        if (!in_memory_only_) check_storage();
        close_in_flight();
    }

 private:
    std::size_t num_arrays() const { return expected_.arrays.size(); }
    std::size_t extent() const { return extent_of(tasklet_numel_); }
    std::size_t extent_of(std::size_t numel) const {
        return extent_bytes(Regions(kFp32, num_arrays(), numel, Blocks::grid()));
    }

    void open(const std::string& folder) {
        const std::string path = make_file(folder, "stress", 2 * num_tasklets_ * extent(), seed_);
        files_.push_back(open_file(path));
        ::unlink(path.c_str());
    }

    StateFile open_file(const std::string& path) {
        if (random_.coin()) return StateFile(path, Access::kBuffered, scheduler_);
        try {
            return StateFile(path, Access::kDirect, scheduler_);
        } catch (const SystemError&) {
            return StateFile(path, Access::kBuffered, scheduler_);  // a file system without direct I/O
        }
    }

    std::unique_ptr<Pipeline> make_pipeline() {
        PipelineOptions options{
            files_, {}, random_.between(1, 4), extent(), random_.between(1, 4), random_.between(1, 3), random_engine()};
        for (std::size_t index = 0; index < num_resident_; ++index) {
            options.resident.extent_bytes.push_back(tasklet(index).extent_bytes);
        }
        options.resident.writes_through = !in_memory_only_;
        return std::make_unique<Pipeline>(std::move(options));
    }

    std::optional<IoEngineKind> random_engine() {
        const IoEngineKind kind = kIoEngineKinds[random_.upto(std::size(kIoEngineKinds) - 1)];
        return unavailable(kind) ? std::nullopt : std::optional(kind);
    }

    // Injects faults for one round. Each call adds a decorator, so delays and short transfers accumulate.
    void inject(std::size_t round) {
        Faults faults;
        faults.seed = seed_ + round;
        faults.max_delay_us = static_cast<std::int64_t>(random_.upto(150));
        faults.short_transfer_every = static_cast<std::int64_t>(random_.upto(3));
        failing_ = random_.coin() && !in_memory_only_;  // state that is only in memory does not survive a failure
        cuda_.delay(seed_ + round, static_cast<int>(random_.upto(200)));
        const auto number = static_cast<std::int64_t>(random_.upto(num_tasklets_ - 1));
        const auto num_reads = static_cast<std::int64_t>(num_tasklets_ - num_resident_);
        if (failing_ && stream_ && random_.coin()) {
            // Each tasklet has at least one copy each way.
            const bool fetches = master_in_parameter_ && random_.coin();
            cuda_.fail(fetches ? "cuMemcpyDtoHAsync_v2" : "cuEventRecord", static_cast<int>(number), kCudaOutOfMemory);
        } else if (failing_ && num_reads > 0 && random_.coin()) {
            faults.fail_read_at = number % num_reads;
        } else if (failing_) {
            faults.fail_write_at = number;
        }
        Seams::decorate_engine(*pipeline_, [&faults](std::unique_ptr<IoEngine> engine) {
            return std::make_unique<FaultInjectingEngine>(std::move(engine), faults);
        });
    }

    // With two files a tasklet moves from one to the other.
    std::size_t file_of(std::size_t index, std::size_t place) const { return (index + place) % files_.size(); }

    Tasklet tasklet(std::size_t index) const {
        Tasklet tasklet;
        tasklet.index = index;
        tasklet.numel = std::min(tasklet_numel_, numel_ - index * tasklet_numel_);
        tasklet.num_arrays = num_arrays();
        tasklet.extent_bytes = extent_of(tasklet.numel);
        tasklet.read_file = file_of(index, place_[index]);
        tasklet.write_file = file_of(index, 1 - place_[index]);
        tasklet.read_offset = (2 * index + place_[index]) * extent();
        tasklet.write_offset = (2 * index + (1 - place_[index])) * extent();
        tasklet.read_generation = generation_;
        tasklet.write_generation = generation_ + 1;
        return tasklet;
    }

    std::optional<Failure> work(const Batch& batch) {
        const std::size_t begun = submit_some(batch);
        std::vector<std::thread> waiters;
        for (std::size_t i = random_.upto(2); i > 0; --i) {
            const std::size_t first = random_.upto(begun);
            waiters.emplace_back([this, first] { (void)pipeline_->wait(first, std::nullopt); });
        }
        for (std::size_t i = begun > 0 ? random_.upto(2) : 0; i > 0; --i) {
            const std::vector<std::size_t> positions{random_.upto(begun - 1), random_.upto(begun - 1)};
            waiters.emplace_back([this, positions] { (void)pipeline_->wait_for(positions); });
        }
        submit_others(batch, begun);
        if (random_.coin()) (void)pipeline_->wait(0, std::nullopt);
        auto failure = pipeline_->finish();
        for (std::thread& waiter : waiters) waiter.join();
        require(!pipeline_->finish(), "a failure outlives its batch", seed_);
        return failure;
    }

    // Submits the first tasklets of the batch, on a device all of them, and returns how many.
    std::size_t submit_some(const Batch& batch) {
        const std::size_t all = batch.tasklets.size();
        const std::size_t begun = batch.stream || random_.coin() ? all : random_.upto(all);
        pipeline_->submit(part(batch, 0, begun));
        return begun;
    }

    // Adds the other tasklets, some at a time, while the batch is in progress, done or failed.
    void submit_others(const Batch& batch, std::size_t begun) {
        while (begun < batch.tasklets.size()) {
            if (random_.coin()) std::this_thread::sleep_for(std::chrono::microseconds(random_.upto(300)));
            const std::size_t end = random_.between(begun, batch.tasklets.size());
            pipeline_->extend(part(batch, begun, end));
            begun = end;
        }
    }

    static Batch part(const Batch& batch, std::size_t begin, std::size_t end) {
        const auto at = [&](std::size_t index) { return batch.tasklets.begin() + static_cast<std::ptrdiff_t>(index); };
        return Batch{batch.operation, {at(begin), at(end)}, batch.steps, batch.stream};
    }

    Batch whole(Operation operation, State& state) const {
        Batch batch{operation, {}, {}, nullptr};
        for (std::size_t index = 0; index < num_tasklets_; ++index) {
            batch.tasklets.push_back(tasklet(index));
            Tasklet& added = batch.tasklets.back();
            Segment segment;
            segment.numel = added.numel;
            segment.num_arrays = num_arrays();
            for (std::size_t array = 0; array < num_arrays(); ++array) {
                segment.arrays[array] = address(state.arrays[array], index * tasklet_numel_);
            }
            added.segments.push_back(segment);
        }
        return batch;
    }

    static Address address(const std::vector<float>& values, std::size_t index) {
        return reinterpret_cast<Address>(values.data() + index);
    }

    void initialize() {
        for (auto& array : expected_.arrays) random_.fill(array);
        for (float& value : expected_.arrays.back()) value = value * value;  // an array of squares is the last one
        if (std::holds_alternative<RmspropStep>(steps_.front())) {           // average squared <= average of squares
            for (std::size_t i = 0; i < numel_; ++i) {
                float& square = expected_.arrays[1][i];
                expected_.arrays[3][i] = 0.5f * square;
                square = square * square;
            }
        }
        parameters_ = expected_.arrays[0];
        require(!work(whole(Operation::kWrite, expected_)), "the first write failed", seed_);
        commit();
    }

    void commit() {
        for (std::size_t& place : place_) place = 1 - place;
        ++generation_;
    }

    // Does a step. If it fails, a second attempt starts from the committed generation, which is intact.
    void update() {
        random_.fill(gradients_);
        const Batch batch = update_batch();
        const std::vector<float> before = parameters_;
        if (auto failure = work(batch)) {
            const int error = failure->kind == FailureKind::kCuda ? kCudaOutOfMemory : EIO;
            require(failing_ && failure->error == error, failure->message.c_str(), seed_);
            parameters_ = before;
            require(!work(batch), "the second attempt failed", seed_);
        } else {
            require(!failing_, "a failure was lost", seed_);
        }
        expect(batch);
        require(parameters_ == expected_.arrays[0], "a parameter differs", seed_);
        commit();
    }

    Batch update_batch() {
        Batch batch{Operation::kUpdate, {}, steps_, stream_};
        for (std::size_t index = 0; index < num_tasklets_; ++index) {
            Tasklet added = tasklet(index);
            added.master_in_parameter = master_in_parameter_;
            for (std::size_t offset = 0; offset < added.numel;) {
                const std::size_t numel = std::min<std::size_t>(random_.between(1, 9000), added.numel - offset);
                const std::size_t first = index * tasklet_numel_ + offset;
                Segment segment;
                segment.offset = offset;
                segment.numel = numel;
                segment.step = static_cast<std::int64_t>(random_.upto(steps_.size())) - 1;
                segment.gradient = address(gradients_, first);
                segment.parameter = address(parameters_, first);
                added.segments.push_back(segment);
                offset += numel;
            }
            batch.tasklets.push_back(added);
        }
        if (random_.coin()) random_.shuffle(batch.tasklets);
        return batch;
    }

    void expect(const Batch& batch) {
        const FlushSubnormals flush;
        for (const Tasklet& tasklet : batch.tasklets) {
            for (const Segment& segment : tasklet.segments) {
                if (segment.step == kNoStep) continue;
                const UpdateStep& step = steps_[static_cast<std::size_t>(segment.step)];
                const std::size_t first = tasklet.index * tasklet_numel_ + segment.offset;
                for (std::size_t i = first; i < first + segment.numel; ++i) {
                    std::visit([&](const auto& scalars) { update_element(scalars, gradients_[i], expected_, i); },
                               step);
                }
            }
        }
    }

    void check_state() {
        State found = expected_;
        for (auto& array : found.arrays) std::fill(array.begin(), array.end(), -1.0f);
        require(!work(whole(Operation::kRead, found)), "the state cannot be read", seed_);
        require(found == expected_, "the state differs", seed_);
        for (const auto& array : found.arrays) record(array.data(), array.size() * sizeof(float));
    }

    // Checks that a pipeline without resident tasklets reads the state that was written through.
    void check_storage() {
        num_resident_ = 0;
        pipeline_ = make_pipeline();
        check_state();
    }

    // Closes a pipeline while a thread waits, and destroys another one, with work in flight.
    void close_in_flight() {
        const Batch batch = update_batch();
        inject(100);
        pipeline_->submit(batch);
        std::atomic<bool> returned{false};
        std::thread waiter([&] {
            try {
                (void)pipeline_->wait(0, std::nullopt);
            } catch (const std::invalid_argument&) {
                // It was closed before the wait began.
            }
            returned = true;
        });
        if (random_.coin()) std::this_thread::sleep_for(std::chrono::microseconds(random_.upto(200)));
        pipeline_->close();
        waiter.join();
        require(returned, "a waiter was forgotten", seed_);
        auto other = make_pipeline();
        other->submit(batch);
    }

    const std::uint64_t seed_;
    const std::shared_ptr<IoScheduler> scheduler_;
    const std::vector<UpdateStep>& steps_;
    const FakeCuda& cuda_;
    Random random_;
    std::size_t numel_;
    std::size_t num_tasklets_ = 0;
    std::size_t tasklet_numel_ = 0;
    std::size_t num_resident_ = 0;  // the first tasklets
    bool in_memory_only_ = false;
    bool master_in_parameter_ = false;
    bool failing_ = false;
    std::uint64_t generation_ = 0;
    std::vector<std::size_t> place_;
    State expected_;
    std::vector<float> parameters_;
    std::vector<float> gradients_;
    std::shared_ptr<CudaStream> stream_;  // null if parameters are in host memory
    std::vector<StateFile> files_;
    std::unique_ptr<Pipeline> pipeline_;
};

}  // namespace
}  // namespace smart_infinity

int main(int argc, char** argv) {
    using namespace smart_infinity;
    const FakeCuda cuda(argv[argc - 1]);
    return run_scenarios(argc, argv, [&](std::uint64_t seed) {
        if (seed == 0) {
            require(disk_gets_requests_while_handlers_compute(argv[1]), "the disk waits for handlers", seed);
        }
        const auto scheduler = std::make_shared<IoScheduler>((1 + seed % 4) << 12);
        Scenario(argv[1], seed, cuda, scheduler).run();
        require(scheduler->in_flight_bytes() == (1 + seed % 4) << 12, "a ring has no end", seed);
    });
}
