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

#include "base/failure.hpp"
#include "io/counters.hpp"
#include "io/deadline_engine.hpp"
#include "io/io_engines.hpp"
#include "io/state_file.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {

// Bytes between memory and files, in the background: plain content, without tasklets. The memory of a request must stay
// until it has been waited for.
//
// Completions drive it, as in a Pipeline: the mutex is never held during I/O.
class FileQueue final : private CompletionHandler {
 public:
    using Ticket = std::uint64_t;

    // Requests that do not return in time are abandoned. Until they return they keep their file, and `used`, which
    // their memory belongs to.
    struct Deadline {
        std::chrono::milliseconds timeout;
        std::shared_ptr<void> used;
    };

    // Throws std::invalid_argument for a number of threads out of range, SystemError for an engine that is unavailable.
    // `memory`, which must stay until the end of the queue, is registered with an engine that gains by it; requests may
    // name any other.
    explicit FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine = std::nullopt,
                       MemoryRange memory = {}, std::optional<Deadline> deadline = std::nullopt);
    // Closes first. What an abandoned request uses is never freed.
    ~FileQueue();

    // Returns at once. Throws std::invalid_argument for no bytes, or what direct I/O cannot transfer.
    Ticket submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data, std::size_t bytes);
    // Waits until the request has ended; its ticket is used up, and waiting for it again finds no failure. Throws
    // std::invalid_argument for a ticket that was never given out.
    //
    // `poll` is called every kPollInterval and at the end, holding no lock. What it throws ends the wait; the request
    // goes on and its ticket stays open.
    using Poll = std::function<void()>;
    static constexpr std::chrono::milliseconds kPollInterval{50};
    std::optional<Failure> wait(Ticket ticket, const Poll& poll = [] {});
    Counters report() const;
    IoEngineKind io_engine() const;
    // Returns whether an abandoned request has not returned.
    bool busy() const;
    // Waits for what is in flight, but not for abandoned requests. Later submissions throw.
    void close();
    // Puts an engine in front of the present one. Nothing may be in flight.
    void decorate_engine(const DeadlineEngine::Decorate& decorate);

 private:
    struct Part {
        StateFile file;  // keeps its descriptor open
        Transfer transfer;
        Ticket ticket;
    };

    struct Request {
        std::size_t parts_left = 0;
        std::optional<Failure> failure;  // the first
    };

    std::unique_ptr<IoEngine> make_engine(const IoOptions& options);
    std::optional<Failure> failure_of(const Part& part, Transfer::Progress progress) const;
    void completed(const IoRequest& request, const IoResult& result) override;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<Ticket, Request> requests_;  // not waited for yet
    std::unordered_map<std::size_t, Part> parts_;   // in flight, by tag
    Ticket next_ticket_ = 0;
    std::size_t next_tag_ = 0;
    Counters counters_;
    bool closed_ = false;
    std::vector<StateFile> abandoned_;  // the files of abandoned requests
    std::optional<Deadline> deadline_;
    DeadlineEngine* watch_ = nullptr;   // the engine, if there is a deadline
    std::unique_ptr<IoEngine> engine_;  // last: its destructor waits for threads that use all of the above
};

}  // namespace smart_infinity
