#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <set>

#include "io/io_engine.hpp"

namespace smart_infinity {

// The purpose of a transfer, most urgent first.
enum class IoClass {
    kAwaited,      // forward or backward waits for it
    kGather,       // tasklets of parameters that a caller will gather
    kState,        // other tasklets
    kWriteBehind,  // memory is freed after it has been written
    kBackground,   // copies and checks that no caller waits for
};

constexpr std::size_t kNumIoClasses = 5;

const char* name_of(IoClass io_class);

// Counts the requests of one class that waited while requests of the other class were running.
struct IoWaits {
    std::uint64_t requests = 0;
    std::uint64_t bytes = 0;  // of the other class, transferred meanwhile
    double seconds = 0;       // waiting time, divided among the classes in proportion to these bytes
};

// By the class that waited, then by the class that it waited for.
using IoWaitTable = std::array<std::array<IoWaits, kNumIoClasses>, kNumIoClasses>;

// Starts the requests of all engines that use one device in the order of their classes, with a limit on the bytes in
// flight. Within a class they start in the order of submission. A request larger than the limit runs alone.
//
// An abandoned request no longer counts. Requests that waited for it start, and their time counts from the last return
// of any request (IoRequest::since): so all engines abandon a device that does not answer at about the same time.
//
// A caller may hold a mutex that its CompletionHandler locks: handlers are called without the scheduler's mutex.
class IoScheduler {
 public:
    // More bytes than any device needs to be busy, but so few that an urgent request waits for about 30 ms of a disk.
    static constexpr std::size_t kInFlightBytes = std::size_t{64} << 20;

    // `num_processes` processes share the device; each gets an equal share of the bytes.
    explicit IoScheduler(std::size_t in_flight_bytes = kInFlightBytes, std::size_t num_processes = 1)
        : in_flight_bytes_(in_flight_bytes), num_processes_(num_processes) {}
    IoScheduler(const IoScheduler&) = delete;
    IoScheduler& operator=(const IoScheduler&) = delete;

    // Starts the request now or in its turn. Engine and handler must exist until the handler was called.
    void submit(IoEngine& engine, const IoRequest& request, IoClass io_class, CompletionHandler& handler);
    // Removes a request that has not started. Returns whether there was one: its handler is then never called.
    bool cancel(const CompletionHandler& handler, std::size_t tag);
    // Moves a request that has not started to a more urgent class.
    void hasten(const CompletionHandler& handler, std::size_t tag, IoClass io_class);
    IoWaitTable waits() const;
    // Raises the limit to this process's share of at least `bytes`, until narrow() is called with the same number. The
    // buffers of a ring then never wait for each other, unless other processes also use the device.
    void widen(std::size_t bytes);
    void narrow(std::size_t bytes);
    std::size_t in_flight_bytes() const;

 private:
    using Clock = std::chrono::steady_clock;
    using BytesByClass = std::array<std::uint64_t, kNumIoClasses>;

    struct Waiting {
        IoEngine* engine;
        IoRequest request;
        IoClass io_class;
        CompletionHandler* handler;
        Clock::time_point since;
        BytesByClass ended_before;
    };

    class Running;  // informs the scheduler and then the handler that a request has ended

    std::deque<Waiting> extract(const CompletionHandler& handler, std::size_t tag);
    void start_next();
    void start(const Waiting& next) noexcept;
    void count_wait(const Waiting& next);
    void ended(const IoRequest& request, const IoResult& result, IoClass io_class);
    std::size_t limit() const {
        return std::max(in_flight_bytes_, widened_.empty() ? 0 : *widened_.rbegin()) / num_processes_;
    }

    const std::size_t in_flight_bytes_;
    const std::size_t num_processes_;
    std::multiset<std::size_t> widened_;
    mutable std::mutex mutex_;
    std::array<std::deque<Waiting>, kNumIoClasses> waiting_;
    std::uint64_t in_flight_ = 0;
    BytesByClass ended_bytes_{};
    IoWaitTable waits_{};
    Clock::time_point last_return_{};
};

}  // namespace smart_infinity
