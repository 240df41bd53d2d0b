// The instructions of x86 that crc32c_folding.inl uses: a part of crc32c_128.cpp and crc32c_512.cpp.

#include <immintrin.h>

#include <cstdint>

namespace {

using Crc = std::uint64_t;

inline Crc crc_of_word(Crc crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
inline Crc crc_of_byte(Crc crc, unsigned char byte) { return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte); }

inline std::uint64_t carryless_product(std::uint32_t left, std::uint32_t right) {
    const __m128i product =
        _mm_clmulepi64_si128(_mm_cvtsi32_si128(static_cast<int>(left)), _mm_cvtsi32_si128(static_cast<int>(right)), 0);
    return static_cast<std::uint64_t>(_mm_cvtsi128_si64(product));
}

}  // namespace
