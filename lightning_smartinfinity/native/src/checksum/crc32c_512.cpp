#include "checksum/crc32c_folding.hpp"
#include "checksum/crc32c_x86.inl"

namespace {

struct Lanes {
    using Register = __m512i;

    static Register load(const unsigned char* data) { return _mm512_loadu_si512(data); }
    static void store(unsigned char* out, Register value) { _mm512_store_si512(out, value); }
    static Register in_every_lane(std::uint64_t first, std::uint64_t second) {
        const auto low = static_cast<long long>(first);
        const auto high = static_cast<long long>(second);
        return _mm512_set_epi64(high, low, high, low, high, low, high, low);
    }
    static Register multiply_add(Register value, Register factors, Register addend) {
        constexpr int kXorOfThree = 0x96;
        const __m512i first = _mm512_clmulepi64_epi128(value, factors, 0x00);
        const __m512i second = _mm512_clmulepi64_epi128(value, factors, 0x11);
        return _mm512_ternarylogic_epi64(first, second, addend, kXorOfThree);
    }
};

}  // namespace

#include "checksum/crc32c_folding.inl"

std::uint32_t smart_infinity::extend_crc32c_512(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    return extend(crc, data, bytes);
}
