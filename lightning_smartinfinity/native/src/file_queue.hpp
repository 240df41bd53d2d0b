#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "counters.hpp"
#include "failure.hpp"
#include "io_engines.hpp"
#include "process.hpp"
#include "state_file.hpp"

namespace smart_infinity {

// Bytes between memory and files, in the background: plain content, without tasklets. The memory of a request must stay
// until it has been waited for.
//
// Like a Pipeline it has an end: close() may come while other threads wait, and a forked child leaves it alone.
class FileQueue {
 public:
    using Ticket = std::uint64_t;
    using Decorate = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

    // Throws std::invalid_argument for a number of threads out of range, SystemError for an engine that is not to be
    // had.
    // `memory`, which must stay until the end of the queue, is registered with an engine that gains by it; requests may
    // name any other.
    explicit FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine = std::nullopt,
                       MemoryRange memory = {});
    ~FileQueue();
    FileQueue(const FileQueue&) = delete;
    FileQueue& operator=(const FileQueue&) = delete;

    // Returns at once. Throws std::invalid_argument for no bytes, or what direct I/O cannot transfer.
    Ticket submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data, std::size_t bytes);
    // Until the request has ended; its ticket is used up. Throws std::invalid_argument for a ticket that is not open.
    std::optional<Failure> wait(Ticket ticket);
    Counters counters() const;
    // Waits for what is in flight, then gives back threads and descriptors. Idempotent.
    void close();
    // Puts an engine in front of the present one. Nothing may be in flight.
    void decorate_engine(const Decorate& decorate);

 private:
    class Loop;
    std::shared_ptr<Loop> loop() const;  // throws std::invalid_argument when closed

    Process process_;
    mutable std::mutex mutex_;  // of loop_ and final_counters_
    std::shared_ptr<Loop> loop_;
    Counters final_counters_;
};

}  // namespace smart_infinity
