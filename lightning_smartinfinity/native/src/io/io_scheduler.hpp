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

// Why something is transferred, most urgent first.
enum class IoClass {
    kAwaited,      // forward or backward waits for it
    kGather,       // tasklets of parameters that somebody wants to gather
    kState,        // other tasklets
    kWriteBehind,  // memory is freed when it has been written
    kBackground,   // copies and checks that nobody waits for
};

constexpr std::size_t kNumIoClasses = 5;

const char* name_of(IoClass io_class);

// Counts the requests of one class that waited while requests of the other class were running.
struct IoWaits {
    std::uint64_t requests = 0;
    std::uint64_t bytes = 0;  // that ended meanwhile
    double seconds = 0;       // of waiting, divided among the classes in proportion to these bytes
};

// By the class that waited, then by the class that it waited for.
using IoWaitTable = std::array<std::array<IoWaits, kNumIoClasses>, kNumIoClasses>;

// Lets the requests of all engines that use one device start in the order of their classes, and only so many bytes at
// a time. Within a class they start in the order of submission. A request larger than the limit runs alone.
//
// A request that was abandoned counts no more. What waited for it starts, and its time counts from the last request on
// that returned (IoRequest::since): a device that answers nobody is given up by all engines at about the same time.
//
// A caller may hold a mutex that its CompletionHandler takes: handlers are called without the scheduler's mutex.
class IoScheduler {
 public:
    // More bytes than any device needs to be busy, and so few that an urgent request waits for some 30 ms of a disk.
    static constexpr std::size_t kInFlightBytes = std::size_t{64} << 20;

    // The device is shared equally by so many processes: each has its part of the bytes.
    explicit IoScheduler(std::size_t in_flight_bytes = kInFlightBytes, std::size_t num_processes = 1)
        : in_flight_bytes_(in_flight_bytes), num_processes_(num_processes) {}
    IoScheduler(const IoScheduler&) = delete;
    IoScheduler& operator=(const IoScheduler&) = delete;

    // Starts the request now or in its turn. Engine and handler must live until the handler was called.
    void submit(IoEngine& engine, const IoRequest& request, IoClass io_class, CompletionHandler& handler);
    // Forgets a request that has not started. Returns whether there was one: its handler is then never called.
    bool cancel(const CompletionHandler& handler, std::size_t tag);
    // Moves a request that has not started to a more urgent class.
    void hasten(const CompletionHandler& handler, std::size_t tag, IoClass io_class);
    IoWaitTable waits() const;
    // Lets at least this process's part of so many bytes be in flight until narrow() is called with the same number.
    // The buffers of a ring then never wait for each other, unless other processes use the device, too.
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

    class Running;  // tells the scheduler and then the handler that a request has ended

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
