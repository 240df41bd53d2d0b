#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/busy_time.hpp"
#include "base/failure.hpp"
#include "base/worker_pool.hpp"
#include "card/card_options.hpp"
#include "extent/batch.hpp"
#include "extent/extent.hpp"
#include "io/counters.hpp"
#include "io/deadline_engine.hpp"
#include "io/io_engines.hpp"
#include "io/state_file.hpp"
#include "io/transfer.hpp"
#include "pipeline/parameter_slots.hpp"
#include "pipeline/resident_tasklets.hpp"
#include "pipeline/schedule.hpp"
#include "pipeline/transfer_run.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

constexpr std::size_t kMaxBuffers = 4096;
constexpr std::size_t kMaxThreads = 1024;

struct PipelineOptions {
    std::vector<StateFile> files;
    Identity identity;
    std::size_t num_buffers;
    std::size_t buffer_bytes;
    std::size_t io_threads = 4;
    std::size_t compute_threads = 1;
    std::optional<IoEngineKind> io_engine = std::nullopt;  // none: the fastest that works here
    ResidentOptions resident = {};
    std::optional<CardOptions> card = std::nullopt;  // none: the host updates
};

// Runs a TransferSchedule with real buffers, I/O and threads.
//
// Completions drive it: whichever thread ends an action reports it under the mutex and starts what can start next. The
// mutex is never held during I/O or compute. A buffer belongs to the one action in flight on it, so that its memory and
// its Transfer need no lock.
class TransferLoop final : private CompletionHandler {
 public:
    explicit TransferLoop(PipelineOptions options);
    ~TransferLoop();

    // What a wait calls every kPollInterval, holding no lock. What it throws ends the wait; the batch goes on.
    using Poll = std::function<void()>;
    static constexpr std::chrono::milliseconds kPollInterval{50};

    struct Report {
        Counters counters;
        std::size_t ring_bytes = 0;   // of the buffers, and of the slots from the first batch that needs some
        std::size_t cache_bytes = 0;  // of resident tasklets
    };

    Report report() const;
    void submit(Batch batch);
    void extend(Batch more);
    void prefer(const std::vector<std::size_t>& positions);
    std::optional<Failure> wait(std::size_t first, std::optional<std::size_t> last, const Poll& poll);
    std::optional<Failure> wait_for(const std::vector<std::size_t>& positions, const Poll& poll);
    std::optional<Failure> drain(const Poll& poll);
    IoEngineKind io_engine() const;
    // Of the active batch, or the last one: what is wholly done, to the end of its write.
    std::vector<std::size_t> complete() const;
    // Whether something of a card's that was given up has not returned: no batch may be submitted.
    bool busy() const { return updater_->busy() || (deadlines_ != nullptr && deadlines_->any_out()); }
    // Writes that were given up and have not returned: they may still change what they name.
    std::vector<IoRequest> writes_out() const;

    // Ends the batch, whose waiters get a failure, before its time: what is in flight is waited for, nothing is begun.
    void abandon();

    // As abandon(). Later calls throw, except close() and abandon().
    void close();

    // Puts an engine in front of the present one. No batch may be active.
    using Decorate = DeadlineEngine::Decorate;
    void decorate_engine(const Decorate& decorate);
    // As Updater's. No batch may be active.
    void put_before_transfers(std::function<void(const IoRequest&)> gate);

 private:
    void validate(const Batch& batch) const;
    void completed(const IoRequest& request, const IoResult& result) override;
    void compute_item(const Action& action);
    void copy_item(const Action& action);

    // Until `out(schedule)`, which asks about tasklets below `end`, or the active batch, if any, has failed.
    template <typename Out>
    std::optional<Failure> wait_until(std::unique_lock<std::mutex>& lock, const Poll& poll, std::size_t end, Out out);
    template <typename Condition>
    void await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition);

    // With the mutex held:
    void abandon(std::unique_lock<std::mutex>& lock);
    void forget(const std::shared_ptr<TransferRun>& run);
    void require_open() const;
    static void require_listed(const TransferRun& run, const std::vector<std::size_t>& positions);
    void prepare_slots(const Batch& batch);
    void start_ready();
    void start(const Action& action);
    void start_transfer(const Action& action, Direction direction);
    void leave(const TransferItem& item);
    void count(const IoRequest& request, const IoResult& result);
    void end(Work work, std::size_t tasklet, std::optional<Failure> failure);

    std::unique_ptr<IoEngine> make_engine();
    IoOptions io_options() const;
    ExtentMemory memory(std::size_t buffer) const;
    std::size_t num_buffers() const { return options_.num_buffers * (resident_.count() > 0 ? 2 : 1); }
    std::optional<Failure> failure_of(const Transfer& transfer, Transfer::Progress progress, std::size_t buffer) const;
    const std::string& path_of(const Tasklet& tasklet, Direction direction) const;
    std::optional<Failure> compute(const TransferItem& item, std::size_t buffer);
    std::byte* slot(const Batch& batch, std::size_t index) const;

    // A transfer of an extent, whose pieces end in any order.
    struct UnderWay {
        std::size_t num_pieces = 0;
        std::optional<Failure> failure;  // the first
    };

    PipelineOptions options_;
    std::unique_ptr<Updater> updater_;
    ResidentTasklets resident_;        // its generations with the mutex held; a place belongs to its tasklet's buffer
    std::vector<Transfer> transfers_;  // by buffer and piece, those of resident tasklets behind those of the ring
    std::vector<UnderWay> under_way_;  // by buffer
    std::vector<TransferItem> items_;  // by buffer: what it holds
    std::vector<std::size_t> positions_;  // by buffer: of what it holds

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::shared_ptr<TransferRun> run_;  // the active batch; shared with those who wait for it
    std::vector<bool> complete_;        // of the batch before, by position
    Counters counters_;
    std::vector<BusyTime> busy_;  // by file
    bool closed_ = false;
    std::unique_ptr<ParameterSlots> slots_;  // changes only while no batch is active

    DeadlineEngine* deadlines_ = nullptr;  // engine_, of a card

    // Last: their destructors wait for threads that use all of the above.
    std::unique_ptr<IoEngine> engine_;
    WorkerPool<Action> compute_pool_;
    std::unique_ptr<WorkerPool<Action>> copy_pool_;  // with the slots
};

}  // namespace smart_infinity
