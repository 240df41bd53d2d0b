#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/buffer.hpp"
#include "base/failure.hpp"
#include "base/worker_pool.hpp"
#include "extent/batch.hpp"
#include "io/counters.hpp"
#include "pipeline/active_batch.hpp"
#include "pipeline/device_traffic.hpp"
#include "pipeline/extent_transfers.hpp"
#include "pipeline/parameter_slots.hpp"
#include "pipeline/pipeline_options.hpp"
#include "pipeline/resident_tasklets.hpp"
#include "pipeline/schedule.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

// Runs a TransferSchedule with real buffers, I/O and threads.
//
// Completions drive it: the thread that ends an action reports it under the mutex, and starts the actions that are now
// ready. The mutex is never held during I/O or compute. A buffer belongs to its single action in flight, so its memory
// and its transfer need no lock.
class Pipeline final {
 public:
    explicit Pipeline(PipelineOptions options);
    // Closes the pipeline. Memory that an abandoned call still uses is never freed.
    ~Pipeline();

    // Called by a wait every kPollInterval without a lock. If it throws, the wait ends, but the batch continues.
    using Poll = std::function<void()>;
    static constexpr std::chrono::milliseconds kPollInterval{50};

    struct Report {
        Counters counters;
        DeviceTraffic traffic;
        std::size_t ring_bytes = 0;   // buffers, and both kinds of slots after a batch has needed them
        std::size_t cache_bytes = 0;  // resident tasklets
    };

    Report report() const;
    // Returns whether a batch may be submitted: while busy(), only updates of state in memory that are not written.
    bool accepts(const Batch& batch) const;
    // Starts a batch and returns at once. Throws std::invalid_argument for a batch that cannot be processed, or while
    // another is active.
    void submit(Batch batch);
    // Appends tasklets to the active batch and returns at once. Throws std::invalid_argument if they cannot be
    // appended.
    void extend(Batch more);
    // Moves these tasklets of the active batch, in this order, before all others that have not started.
    void prefer(const std::vector<std::size_t>& positions);
    // Waits until tasklets [first, last) of the batch have written out parameters and arrays, or the batch has failed.
    std::optional<Failure> wait(std::size_t first, std::optional<std::size_t> last, const Poll& poll = [] {});
    // Waits in the same way for tasklets at any positions, and moves them before all others that have not started.
    std::optional<Failure> wait_for(const std::vector<std::size_t>& positions, const Poll& poll = [] {});
    // Waits until nothing is in flight; the batch is then over.
    std::optional<Failure> finish(const Poll& poll = [] {});
    IoEngineKind io_engine() const;
    // Returns the positions, in the active or otherwise the last batch, of tasklets that are complete, including
    // writes.
    std::vector<std::size_t> complete() const;
    // Returns whether an abandoned call of the updater, or an abandoned transfer, is unfinished.
    bool busy() const { return updater_->busy() || transfers_.any_abandoned(); }
    // Returns the unfinished abandoned writes: they may still change the bytes in their ranges.
    std::vector<IoRequest> abandoned_writes() const { return transfers_.abandoned_writes(); }

    // Ends the batch early without starting more of it, and waits for the actions in flight. Waits for the batch fail.
    // An exception of `poll` is rethrown at the end.
    void stop(const Poll& poll = [] {});

    // Stops the batch. Later calls throw, except close() and stop().
    void close();

 private:
    friend struct Seams;  // testing/seams.hpp

    // The reads of a tasklet: its state, its gradient, or both.
    struct Reads {
        int num_left = 0;                     // in flight
        std::optional<Failure> failure;       // the first one
        std::shared_ptr<std::byte> gradient;  // address to which it is read, if it is
    };

    WorkerPool<Action> start_computing();
    void validate(const Batch& batch) const;
    void compute_item(const Action& action);
    void copy_item(const Action& action);

    // Waits until `out(schedule)`, which checks tasklets below `end`, is true, or the active batch, if any, has failed.
    template <typename Out>
    std::optional<Failure> wait_until(std::unique_lock<std::mutex>& lock, const Poll& poll, std::size_t end, Out out);
    template <typename Condition>
    void await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition);

    // The following are called with the mutex held.
    void stop_batch(std::unique_lock<std::mutex>& lock, const Poll& poll);
    void forget(const std::shared_ptr<ActiveBatch>& active);
    void require_open() const;
    void prefer_listed(const std::vector<std::size_t>& positions);
    void prepare_slots(const Batch& batch);
    std::shared_ptr<std::byte> gradient_slot(std::size_t buffer, std::size_t bytes);
    void start_ready();
    void start(const Action& action);
    IoClass io_class_of(std::size_t position) const;
    void read(const Action& action);
    void read_ended(std::size_t buffer, std::optional<Failure> failure);
    void leave(const TransferItem& item);
    void transferred(std::size_t buffer, Direction direction, std::optional<Failure> failure);
    void end(Work work, std::size_t tasklet, std::optional<Failure> failure);

    ExtentMemory memory(std::size_t buffer) const;
    std::size_t num_buffers() const { return options_.num_buffers * (resident_.count() > 0 ? 2 : 1); }
    std::optional<Failure> compute(const TransferItem& item, std::size_t buffer);
    std::byte* slot(const Batch& batch, std::size_t index) const;

    const PipelineOptions options_;
    std::unique_ptr<Updater> updater_;
    ResidentTasklets resident_;        // generations: guarded by the mutex; a place: used only by its tasklet's buffer
    std::vector<TransferItem> items_;  // by buffer: its tasklet; buffers of resident tasklets follow the ring's
    std::vector<std::size_t> positions_;  // by buffer: the position of its tasklet in the batch
    std::vector<Reads> reads_;            // by buffer

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<ActiveBatch> batch_;  // the active batch, shared with the threads that wait for it
    std::vector<bool> complete_;          // by position in the last batch
    Counters counters_;
    bool closed_ = false;
    std::unique_ptr<ParameterSlots> slots_;  // changes only while no batch is active
    // One slot per buffer, to which gradients are read from storage; null until the first such read.
    std::shared_ptr<HostBuffer> gradient_slots_;

    // Last members: their destructors wait for threads that use the others.
    ExtentTransfers transfers_;
    WorkerPool<Action> compute_pool_;
    std::unique_ptr<WorkerPool<Action>> copy_pool_;  // created with the first slots
};

}  // namespace smart_infinity
