#include "checksum/crc32c_folding.hpp"
#include "checksum/crc32c_x86.inl"

namespace {

struct Lanes {
    using Register = __m128i;

    static Register load(const unsigned char* data) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data)); }
    static void store(unsigned char* out, Register value) { _mm_store_si128(reinterpret_cast<__m128i*>(out), value); }
    static Register in_every_lane(std::uint64_t first, std::uint64_t second) {
        return _mm_set_epi64x(static_cast<long long>(second), static_cast<long long>(first));
    }
    static Register multiply_add(Register value, Register factors, Register addend) {
        const __m128i first = _mm_clmulepi64_si128(value, factors, 0x00);
        const __m128i second = _mm_clmulepi64_si128(value, factors, 0x11);
        return _mm_xor_si128(_mm_xor_si128(first, second), addend);
    }
};

}  // namespace

#include "checksum/crc32c_folding.inl"

std::uint32_t smart_infinity::extend_crc32c_128(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    return extend(crc, data, bytes);
}
