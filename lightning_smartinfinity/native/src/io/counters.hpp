#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "io/io_engine.hpp"

namespace smart_infinity {

// Counters of one file.
struct FileCounters {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    double busy_seconds = 0;  // time with at least one request in progress

    void count(Direction direction, const IoResult& result) {
        const auto bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(result.transferred, 0));
        (direction == Direction::kRead ? read_bytes : written_bytes) += bytes;
    }
};

// Counters since creation. Seconds are summed over threads; wait_seconds is the time that callers spent waiting.
struct Counters {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::uint64_t read_calls = 0;
    std::uint64_t write_calls = 0;
    std::uint64_t num_abandoned = 0;       // requests that did not return in time, or were refused after such a request
    std::uint64_t cached_read_bytes = 0;   // bytes of resident tasklets that were not read from storage
    std::uint64_t cached_write_bytes = 0;  // bytes of resident tasklets that were not written to storage
    double read_seconds = 0;
    double write_seconds = 0;
    double read_busy_seconds = 0;   // of a queue: time with at least one read in progress
    double write_busy_seconds = 0;  // of a queue: time with at least one write in progress
    double compute_seconds = 0;
    double wait_seconds = 0;
    std::uint64_t system_calls = 0;      // made by the I/O engine
    double io_cpu_seconds = 0;           // CPU time of the engine's threads
    std::uint64_t registered_bytes = 0;  // memory that is pinned for the engine now
    int registration_errno = 0;          // why none is pinned, if the engine requested it; or 0
    std::vector<FileCounters> files;     // counters of a pipeline's files, by index

    // Counts a call that has ended.
    void count(Direction direction, const IoResult& result) {
        const auto bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(result.transferred, 0));
        const bool read = direction == Direction::kRead;
        (read ? read_bytes : written_bytes) += bytes;
        (read ? read_calls : write_calls) += 1;
        (read ? read_seconds : write_seconds) += result.seconds;
        num_abandoned += result.transferred == kNotReturned ? 1 : 0;
    }
};

inline Counters with_usage(Counters counters, const IoUsage& usage) {
    counters.system_calls = usage.system_calls;
    counters.io_cpu_seconds = usage.cpu_seconds;
    counters.registered_bytes = usage.registered_bytes;
    counters.registration_errno = usage.registration_errno;
    return counters;
}

}  // namespace smart_infinity
