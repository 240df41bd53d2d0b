#include "card/card_updater.hpp"

#include <algorithm>
#include <limits>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/abandoned_call.hpp"
#include "card/card_calls.hpp"
#include "card/card_job.hpp"
#include "gradient/compression.hpp"
#include "gradient/gradient_codec.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument(problem);
}

CardOptions checked(CardOptions options) {
    require(options.binding != nullptr, "CardOptions: a card is needed");
    (void)card_kernel_type(options.kernel);
    require(options.gradient_buffer_bytes >= 1 && options.parameter_bytes >= 1,
            "CardOptions: gradient_buffer_bytes and parameter_bytes must be at least 1");
    require(options.timeout.count() >= 1 && options.timeout.count() <= std::numeric_limits<int>::max(),
            "CardOptions: timeout_ms must be in [1, 2**31)");
    options.gradient_buffer_bytes = align_up(options.gradient_buffer_bytes, kBlockBytes);
    options.parameter_bytes = align_up(options.parameter_bytes, kBlockBytes);
    return options;
}

// Keeps abandoned runs until they return.
class AbandonedRuns {
 public:
    void add(std::shared_ptr<CardRun> run) {
        const std::lock_guard lock(mutex_);
        runs_.emplace_back(std::move(run), std::make_unique<AbandonedCall>());
    }
    bool any() {
        const std::lock_guard lock(mutex_);
        const auto first =
            std::remove_if(runs_.begin(), runs_.end(), [](const auto& run) { return has_returned(*run.first); });
        runs_.erase(first, runs_.end());
        return !runs_.empty();
    }

 private:
    static bool has_returned(CardRun& run) {
        try {
            return is_over(run.state());
        } catch (const CardError&) {
            return false;  // a card that does not answer may still write
        }
    }

    std::mutex mutex_;
    std::vector<std::pair<std::shared_ptr<CardRun>, std::unique_ptr<AbandonedCall>>> runs_;
};

// Updates tasklets on a card, in a ring in its DRAM. Only the card and reads and writes of files touch the ring.
//
// `num_threads` threads call work(). It may not be destroyed while busy().
class CardUpdater final : public Updater {
 public:
    CardUpdater(CardOptions options, const Identity& identity, std::size_t num_buffers, std::size_t buffer_bytes,
                std::size_t num_threads)
        : options_(checked(std::move(options))),
          identity_(identity),
          ring_(options_, num_buffers, buffer_bytes),
          calls_(num_threads, options_.timeout) {}

    void require_workable(const Batch& batch) const override {
        require(batch.operation == Operation::kUpdate, "Batch: a card works UPDATE only");
        const CardKernelType type = card_kernel_type(options_.kernel);
        for (const UpdateStep& step : batch.steps) {
            require(type.has(step), std::string("Batch: kernel ") + type.name + " has no " + rule_of(step).step);
        }
        for (const Tasklet& tasklet : batch.tasklets) {
            require_workable(tasklet, type);
            require_fitting_payload(batch, tasklet);
        }
    }

    ExtentMemory memory(std::size_t buffer, const Tasklet&) const override {
        return {ring_.regions(buffer), ring_.trailer_page(buffer)};
    }
    MemoryRange registrable() const override { return {}; }
    std::size_t host_bytes() const override { return ring_.host_bytes(); }

    std::optional<Refusal> work(const Job& job) override {
        // After a call that did not return, each tasklet that has been read would wait for the timeout, too.
        if (busy()) return Refusal{FailureKind::kDevice, "what was asked of it before has not returned", 0};
        CardJob on_card(job, options_, identity_, ring_, calls_);
        std::optional<Refusal> refusal;
        try {
            refusal = on_card.run();
        } catch (const CardError& error) {
            refusal = Refusal{FailureKind::kDevice, error.what(), error.error()};
        }
        if (auto run = on_card.abandoned_run()) abandoned_.add(std::move(run));
        add(on_card.traffic());
        return refusal;
    }

    void transferred(Direction direction, const Tasklet& tasklet) override {
        DeviceTraffic traffic;
        traffic.control_bytes = kTrailerPageBytes;
        const std::uint64_t payload = tasklet.num_arrays * tasklet.numel * sizeof(float);
        (direction == Direction::kRead ? traffic.internal_read_bytes : traffic.internal_write_bytes) = payload;
        traffic.padding_bytes = tasklet.extent_bytes - kTrailerPageBytes - payload;
        add(traffic);
    }

    DeviceTraffic traffic() const override {
        const std::lock_guard lock(mutex_);
        return traffic_;
    }

    void put_before_transfers(CardCalls::Gate gate) override { calls_.put_before_transfers(std::move(gate)); }

    bool busy() const override { return calls_.any_abandoned() || abandoned_.any(); }

 private:
    void add(const DeviceTraffic& traffic) {
        const std::lock_guard lock(mutex_);
        traffic_ += traffic;
    }

    static void require_of(const Tasklet& tasklet, bool condition, const std::string& problem) {
        require(condition, "Batch: tasklet " + std::to_string(tasklet.index) + ": " + problem);
    }

    void require_fitting_payload(const Batch& batch, const Tasklet& tasklet) const {
        if (tasklet.payload == 0) return;
        const std::size_t most =
            batch.codec ? batch.codec->payload_bytes(tasklet.numel, gradient_dtype_of(tasklet)) : tasklet.payload_bytes;
        require_of(tasklet, most <= options_.gradient_buffer_bytes, "its payload does not fit gradient_buffer_bytes");
    }

    void require_workable(const Tasklet& tasklet, const CardKernelType& type) const {
        require_of(tasklet, !tasklet.master_in_parameter, "a card reads the master from storage");
        require_of(tasklet, tasklet.num_arrays == type.num_arrays,
                   std::string("kernel ") + type.name + " has " + std::to_string(type.num_arrays) + " arrays");
        require_of(tasklet, tasklet.numel <= kLargestCardNumel,
                   "a kernel works at most " + std::to_string(kLargestCardNumel) + " elements");
        for (const CardPass& pass : card_passes(tasklet)) {
            require_of(tasklet,
                       tasklet.payload != 0 ||
                           tasklet.numel * item_bytes(pass.gradient_dtype) <= options_.gradient_buffer_bytes,
                       "its gradient does not fit gradient_buffer_bytes");
            require_of(tasklet, tasklet.numel * item_bytes(pass.parameter_dtype) <= options_.parameter_bytes,
                       "its parameters do not fit parameter_bytes");
        }
    }

    const CardOptions options_;
    const Identity identity_;
    CardRing ring_;
    mutable AbandonedRuns abandoned_;
    mutable std::mutex mutex_;
    DeviceTraffic traffic_;
    CardCalls calls_;  // last member: its destructor waits for threads that use the others
};

}  // namespace

PipelineOptions with_card(PipelineOptions options, CardOptions card) {
    require(options.files.size() == 1, "Pipeline: a card has one file");
    require(options.resident.extent_bytes.empty(), "Pipeline: a card has no resident tasklets");
    require(options.identity.format().on_cards, "Pipeline: a card updates fp32 state only");
    // Threads pass the card's memory to system calls. io_uring would register it, which newer kernels refuse.
    const bool direct = options.files.front().access() == Access::kDirect;
    const IoEngineKind kind = options.io_engine.value_or(direct ? IoEngineKind::kThreads : IoEngineKind::kPlain);
    require(kind == IoEngineKind::kThreads || kind == IoEngineKind::kPlain, "Pipeline: a card's I/O runs in threads");
    options.io_engine = kind;
    options.timeout = card.timeout;
    options.make_updater = [card = std::move(card)](const PipelineOptions& checked) {
        return std::make_unique<CardUpdater>(card, checked.identity, checked.num_buffers, checked.buffer_bytes,
                                             checked.compute_threads);
    };
    return options;
}

}  // namespace smart_infinity
