#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/busy_time.hpp"
#include "base/failure.hpp"
#include "base/worker_pool.hpp"
#include "io/counters.hpp"
#include "io/deadline_engine.hpp"
#include "io/io_engines.hpp"
#include "io/io_scheduler.hpp"
#include "io/state_file.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {

// Moves plain bytes, not tasklets, between memory and files in the background. A request's memory must stay valid until
// a caller has waited for the request. Requests wait for their turn at their file's scheduler, if it has one.
//
// Completions drive it, as in Pipeline: the mutex is never held during I/O.
class FileQueue final : private CompletionHandler {
 public:
    using Ticket = std::uint64_t;

    // Requests that do not return in time are abandoned. Until they return, they keep their file open, and keep `used`,
    // which owns their memory, alive.
    struct Deadline {
        std::chrono::milliseconds timeout;
        std::shared_ptr<void> used = nullptr;
        FailureKind kind = FailureKind::kTimeout;  // of requests that did not return; a card's: kDevice
    };

    using Ended = std::function<std::optional<Failure>(const IoRequest& part, std::optional<Failure> failure)>;
    using Finished = std::function<void(std::optional<Failure> failure)>;

    // Options of a request: its priority, its predecessors and its callbacks.
    struct Options {
        IoClass io_class = IoClass::kAwaited;
        std::vector<Ticket> after;  // requests that must end before this one starts
        // Called once for each part that was not cancelled, on a thread of the queue or of the engine, without a lock.
        // Receives the failure of the part, and returns the failure that the request gets. It is kept until an
        // abandoned part returns, and is also destroyed without a lock.
        Ended ended;
        // Called once, when the request has ended, on the same conditions. Receives the failure of the request, on
        // which wait() must then not be called.
        Finished finished;
    };

    // Throws std::invalid_argument if the number of threads is out of range, SystemError if the engine is unavailable.
    // `memory`, which must outlive the queue, is registered with engines that benefit from it; requests may also use
    // other memory. `ended` may compute for long: if `computes`, threads of the queue call it for all but small parts,
    // instead of the only thread of a ring. Each device of `files` gets a ring.
    explicit FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine = std::nullopt,
                       MemoryRange memory = {}, std::optional<Deadline> deadline = std::nullopt, bool computes = false,
                       const std::vector<StateFile>& files = {});
    // Closes the queue first. Memory and files that abandoned requests still use are never freed.
    ~FileQueue();

    // Returns at once. Throws std::invalid_argument for zero bytes, or bytes that direct I/O cannot transfer.
    Ticket submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data, std::size_t bytes,
                  const Options& options);
    Ticket submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data,
                  std::size_t bytes) {
        return submit(direction, file, offset, data, bytes, Options{});
    }
    // Returns whether the request has ended, so that wait() returns at once. Throws as wait() does.
    bool done(Ticket ticket) const;
    // Starts no further part of the request. Returns whether any part was cancelled; such a part is neither transferred
    // nor a failure. Started parts continue, so the memory is free only after wait(). Throws as wait() does.
    bool cancel(Ticket ticket);
    // Waits until the request has ended, and closes its ticket: a second wait finds no failure. Parts that have not
    // started become as urgent as IoClass::kAwaited. Throws std::invalid_argument for a ticket that was never issued.
    //
    // `poll` is called every kPollInterval and at the end, without a lock. If it throws, the wait ends, but the request
    // continues and its ticket stays open.
    using Poll = std::function<void()>;
    static constexpr std::chrono::milliseconds kPollInterval{50};
    std::optional<Failure> wait(Ticket ticket, const Poll& poll = [] {});
    Counters report() const;
    IoEngineKind io_engine() const;
    // Returns whether an abandoned request has not returned yet.
    bool busy() const;
    // Waits for requests in flight, but not for abandoned ones. Later submissions throw.
    void close();

 private:
    friend struct Seams;  // testing/seams.hpp

    struct Request {
        Request(StateFile of, Options how) : file(std::move(of)), options(std::move(how)) {}
        const StateFile file;  // keeps its descriptor open
        Options options;
        std::size_t num_before = 0;  // number of predecessors that have not ended
        std::vector<Ticket> next;    // requests that wait for this one
        std::vector<IoRequest> unstarted;
        std::size_t parts_left = 0;
        std::optional<Failure> failure;  // the first one, unless a later part is abandoned: that failure replaces it
        bool abandoned = false;          // whether a part has not returned in time
        bool hastened = false;
    };

    struct Part {
        std::shared_ptr<Request> request;
        IoRequest whole;
        Transfer transfer;
        Ticket ticket;
        bool attempted = false;  // then some of its bytes may have been transferred
    };

    struct EndedPart {
        Part part;
        std::optional<Failure> failure;
        bool abandons;  // whether it has not returned in time
    };

    std::unique_ptr<IoEngine> make_engine(const IoOptions& options);
    std::optional<Failure> failure_of(const Part& part, Transfer::Progress progress, const IoResult& result) const;
    void require_issued(Ticket ticket) const;
    bool has_ended(Ticket ticket) const;
    std::shared_ptr<Request> find(Ticket ticket) const;
    void start(Ticket ticket, const std::shared_ptr<Request>& request);
    void attempt(const Part& part);
    void hasten(Ticket ticket);
    void count(Direction direction, const IoResult& result);
    static Ended take_unused(Request& request);
    void end_of(Request& request);
    void completed(const IoRequest& request, const IoResult& result) override;
    void end_part(const EndedPart& ended);

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<Ticket, std::shared_ptr<Request>> requests_;  // not waited for yet
    std::unordered_map<std::size_t, Part> parts_;                    // submitted, by tag
    std::size_t num_unended_ = 0;                                    // requests
    Ticket next_ticket_ = 0;
    std::size_t next_tag_ = 0;
    Counters counters_;
    BusyTime reading_, writing_;
    bool closed_ = false;
    std::vector<std::shared_ptr<Request>> abandoned_;  // keep their files and the objects that `ended` captured
    std::optional<Deadline> deadline_;
    DeadlineEngine* watch_ = nullptr;  // the engine, if there is a deadline
    // Last members: their destructors wait for threads that use all of the above.
    std::unique_ptr<WorkerPool<EndedPart>> callers_;  // call `ended`; null: the engine's threads do
    std::unique_ptr<IoEngine> engine_;
};

}  // namespace smart_infinity
