#include <immintrin.h>

#include "checksum/crc32c_folding.hpp"

namespace {

struct Lanes {
    using Register = __m256i;

    static Register load(const unsigned char* data) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
    }
    static void store(unsigned char* out, Register value) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(out), value);
    }
    static Register in_every_lane(std::uint64_t first, std::uint64_t second) {
        return _mm256_broadcastsi128_si256(
            _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first)));
    }
    static Register multiply_add(Register value, Register factors, Register addend) {
        const __m256i first = _mm256_clmulepi64_epi128(value, factors, 0x00);
        const __m256i second = _mm256_clmulepi64_epi128(value, factors, 0x11);
        return _mm256_xor_si256(_mm256_xor_si256(first, second), addend);
    }
};

}  // namespace

#include "checksum/crc32c_folding.inl"

std::uint32_t smart_infinity::extend_crc32c_256(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    return extend(crc, data, bytes);
}
