#pragma once

// CRC-32C by carry-less multiplication, compiled for each width of registers from crc32c_folding.inl.
//
// Like kernels.hpp, this header holds no inline function: translation units for newer instruction sets include it.

#include <cstddef>
#include <cstdint>

namespace smart_infinity {

// Returns the checksum register after `bytes` more bytes.
using ExtendCrc32c = std::uint32_t(std::uint32_t crc, const unsigned char* data, std::size_t bytes);

ExtendCrc32c extend_crc32c_128;  // needs SSE4.2 and PCLMULQDQ; on ARM, CRC32 and PMULL
ExtendCrc32c extend_crc32c_512;  // also needs AVX-512F and VPCLMULQDQ

}  // namespace smart_infinity
