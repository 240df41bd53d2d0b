#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/closable.hpp"
#include "base/failure.hpp"
#include "io/counters.hpp"
#include "io/io_engines.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

// Bytes between memory and files, in the background: plain content, without tasklets. The memory of a request must stay
// until it has been waited for.
class FileQueue {
 public:
    using Ticket = std::uint64_t;
    using Decorate = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

    // Requests are given up for their time. Until they return they have their file, and what their memory belongs to.
    struct Deadline {
        std::chrono::milliseconds timeout;
        std::shared_ptr<void> used;
    };

    // Throws std::invalid_argument for a number of threads out of range, SystemError for an engine that is not to be
    // had.
    // `memory`, which must stay until the end of the queue, is registered with an engine that gains by it; requests may
    // name any other.
    explicit FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine = std::nullopt,
                       MemoryRange memory = {}, std::optional<Deadline> deadline = std::nullopt);
    ~FileQueue();
    FileQueue(const FileQueue&) = delete;
    FileQueue& operator=(const FileQueue&) = delete;

    // Returns at once. Throws std::invalid_argument for no bytes, or what direct I/O cannot transfer.
    Ticket submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data, std::size_t bytes);
    // Until the request has ended; its ticket is used up, and waiting for it again finds no failure. Throws
    // std::invalid_argument for a ticket that was never given out.
    //
    // `poll` is called every kPollInterval and at the end, holding no lock. What it throws ends the wait; the request
    // goes on and its ticket stays open.
    using Poll = std::function<void()>;
    static constexpr std::chrono::milliseconds kPollInterval{50};
    std::optional<Failure> wait(Ticket ticket, const Poll& poll = [] {});
    Counters counters() const;
    IoEngineKind io_engine() const;
    // Whether a request that was given up has not returned. Once closed: no.
    bool busy() const;
    // Waits for what is in flight, but not for what was given up, which is lost on purpose; then gives back threads and
    // descriptors. Idempotent.
    void close();
    // Puts an engine in front of the present one. Nothing may be in flight.
    void decorate_engine(const Decorate& decorate);

 private:
    class Loop;
    static std::shared_ptr<Loop> make_loop(const IoOptions& options, std::optional<Deadline> deadline);

    Closable<Loop, Counters> loop_;
};

}  // namespace smart_infinity
