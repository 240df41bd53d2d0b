#pragma once

#include <cstddef>
#include <cstdint>

namespace smart_infinity {

// CRC-32C (Castagnoli) of `bytes` bytes; `value` continues an earlier checksum. By the CPU's instruction, or by a table
// where it has none or the scalar kernels were selected: the same result.
std::uint32_t crc32c(const void* data, std::size_t bytes, std::uint32_t value = 0);

}  // namespace smart_infinity
