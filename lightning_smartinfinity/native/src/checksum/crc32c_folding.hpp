#pragma once

// CRC-32C by carry-less multiplication, compiled for two widths of registers from crc32c_folding.inl.
//
// As kernels.hpp, this header holds no inline function: translation units for newer instruction sets include it.

#include <cstddef>
#include <cstdint>

namespace smart_infinity {

// The checksum's register after `bytes` more bytes.
using ExtendCrc32c = std::uint32_t(std::uint32_t crc, const unsigned char* data, std::size_t bytes);

ExtendCrc32c extend_crc32c_128;  // with SSE4.2 and PCLMULQDQ
ExtendCrc32c extend_crc32c_512;  // with AVX-512F and VPCLMULQDQ, too

}  // namespace smart_infinity
