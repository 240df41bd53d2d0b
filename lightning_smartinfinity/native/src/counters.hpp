#pragma once

#include <algorithm>
#include <cstdint>

#include "io_engine.hpp"

namespace smart_infinity {

// Since creation. Seconds are summed over threads; wait_seconds is what callers spent waiting.
struct Counters {
    std::uint64_t read_bytes = 0;
    std::uint64_t written_bytes = 0;
    std::uint64_t read_calls = 0;
    std::uint64_t write_calls = 0;
    double read_seconds = 0;
    double write_seconds = 0;
    double compute_seconds = 0;
    double wait_seconds = 0;

    // A call has ended.
    void count(Direction direction, const IoResult& result) {
        const auto bytes = static_cast<std::uint64_t>(std::max<std::int64_t>(result.transferred, 0));
        const bool read = direction == Direction::kRead;
        (read ? read_bytes : written_bytes) += bytes;
        (read ? read_calls : write_calls) += 1;
        (read ? read_seconds : write_seconds) += result.seconds;
    }
};

}  // namespace smart_infinity
