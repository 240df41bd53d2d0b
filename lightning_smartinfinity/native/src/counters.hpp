#pragma once

#include <cstdint>

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
};

}  // namespace smart_infinity
