#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/busy_time.hpp"
#include "base/failure.hpp"
#include "extent/batch.hpp"
#include "extent/extent_memory.hpp"
#include "io/counters.hpp"
#include "io/deadline_engine.hpp"
#include "io/io_engines.hpp"
#include "io/io_scheduler.hpp"
#include "io/transfer.hpp"
#include "pipeline/pipeline_options.hpp"

namespace smart_infinity {

// The reads and writes of a pipeline. Each moves an extent between a buffer and a file, in parts that end in any order.
// They wait for their turn at the file's scheduler, if it has one.
class ExtentTransfers final : private CompletionHandler {
 public:
    // Called when all parts of an extent have ended, with the mutex held, on a thread of the I/O engine or on the
    // thread that watches deadlines.
    using Ended = std::function<void(std::size_t buffer, Direction direction, std::optional<Failure> failure)>;

    // `mutex` is the pipeline's. It guards this object and the counters; methods are called with it held.
    ExtentTransfers(const PipelineOptions& options, const MemoryRange& ring, std::size_t num_buffers, std::mutex& mutex,
                    Counters& counters, Ended ended);
    ~ExtentTransfers();

    // Starts a transfer and returns at once. Buffer and tasklet must exist until the transfer has ended.
    void start(std::size_t buffer, const Tasklet& tasklet, const ExtentMemory& memory, Direction direction,
               IoClass io_class);
    bool in_progress(std::size_t buffer) const { return in_progress_[buffer].num_parts > 0; }
    // Makes parts that still wait for their turn more urgent.
    void hasten(std::size_t buffer, IoClass io_class);
    const std::string& path_of(const Tasklet& tasklet, Direction direction) const;

    IoEngineKind engine_kind() const { return engine_->kind(); }
    IoUsage usage() const { return engine_->usage(); }

    // The next two need no mutex. An abandoned transfer is one that did not return in time.
    bool any_abandoned() const { return deadlines_ != nullptr && deadlines_->any_abandoned(); }
    std::vector<IoRequest> abandoned_writes() const;
    // Hands over the engine, whose destructor would wait for abandoned transfers. No other transfer may be in flight.
    std::unique_ptr<IoEngine> take_engine() { return std::move(engine_); }

 private:
    friend struct Seams;  // testing/seams.hpp

    struct InProgress {
        const Tasklet* tasklet = nullptr;
        std::size_t num_parts = 0;
        Direction direction = Direction::kRead;
        IoClass io_class = IoClass::kState;
        std::optional<Failure> failure;  // the first failure
    };

    std::unique_ptr<IoEngine> make_engine(const MemoryRange& ring);
    std::size_t ring_bytes_of_device() const;  // its share of the ring
    const StateFile& file_of(const Tasklet& tasklet, Direction direction) const;
    void submit(const Transfer& transfer);
    void completed(const IoRequest& request, const IoResult& result) override;
    void count(const IoRequest& request, const IoResult& result);
    std::optional<Failure> failure_of(const Transfer& transfer, Transfer::Progress progress, const IoResult& result,
                                      const Tasklet& tasklet) const;

    const PipelineOptions& options_;
    std::mutex& mutex_;
    Counters& counters_;
    const Ended ended_;
    std::vector<Transfer> transfers_;      // by buffer and part
    std::vector<InProgress> in_progress_;  // by buffer
    std::vector<BusyTime> busy_;           // by file
    std::set<IoScheduler*> schedulers_;    // of the files
    DeadlineEngine* deadlines_ = nullptr;  // points to engine_ if there is a timeout
    std::unique_ptr<IoEngine> engine_;     // last member: its destructor waits for threads that use the others
};

}  // namespace smart_infinity
