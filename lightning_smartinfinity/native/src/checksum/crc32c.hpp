#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace smart_infinity {

// Returns the CRC-32C (Castagnoli) of `bytes` bytes; `value` continues an earlier checksum. Uses the CPU's
// instructions, or a table if there are none or the scalar kernels were selected; the result is the same.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t value = 0);

// Returns the checksum of two adjacent ranges of memory from the checksum of each; `bytes` is the second's length.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t bytes);

// Returns the register widths, in bits, for which this CPU has an implementation, slowest first; 0 is the table.
std::vector<int> crc32c_widths();
// Whether crc32c() always returns 0, so that a benchmark can measure the cost of checksums. Only
// module/bind_testing.cpp sets it, which no wheel contains.
std::atomic<bool>& crc32c_left_out();

// Computes the checksum with the given width, one of crc32c_widths().
std::uint32_t crc32c_by(int width, const void* data, std::size_t bytes, std::uint32_t value);

}  // namespace smart_infinity
