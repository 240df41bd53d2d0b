#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace smart_infinity {

// CRC-32C (Castagnoli) of `bytes` bytes; `value` continues an earlier checksum. By what the CPU has
// for it, or by a table where it has nothing or the scalar kernels were selected: the same result.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t value = 0);

// Of two pieces of memory, one behind the other, from the checksum of each; `bytes` are the second's.
std::uint32_t crc32c_combine(std::uint32_t first, std::uint32_t second, std::uint64_t bytes);

// The ways to compute it that this CPU has, slowest first: the bits of the registers; 0 is the table.
std::vector<int> crc32c_widths();
// In one of these ways. Throws std::invalid_argument for another.
std::uint32_t crc32c_by(int width, const void* data, std::size_t bytes, std::uint32_t value = 0);

}  // namespace smart_infinity
