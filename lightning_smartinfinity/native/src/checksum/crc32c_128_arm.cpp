#include <arm_acle.h>
#include <arm_neon.h>

#include "checksum/crc32c_folding.hpp"

namespace {

using Crc = std::uint32_t;

inline Crc crc_of_word(Crc crc, std::uint64_t word) { return __crc32cd(crc, word); }
inline Crc crc_of_byte(Crc crc, unsigned char byte) { return __crc32cb(crc, byte); }

inline std::uint64_t carryless_product(std::uint32_t left, std::uint32_t right) {
    return vgetq_lane_u64(vreinterpretq_u64_p128(vmull_p64(left, right)), 0);
}

struct Lanes {
    using Register = uint64x2_t;

    static Register load(const unsigned char* data) { return vreinterpretq_u64_u8(vld1q_u8(data)); }
    static void store(unsigned char* out, Register value) { vst1q_u8(out, vreinterpretq_u8_u64(value)); }
    static Register in_every_lane(std::uint64_t first, std::uint64_t second) {
        return vcombine_u64(vcreate_u64(first), vcreate_u64(second));
    }
    static Register multiply_add(Register value, Register factors, Register addend) {
        const poly128_t first = vmull_p64(vgetq_lane_u64(value, 0), vgetq_lane_u64(factors, 0));
        const poly128_t second = vmull_high_p64(vreinterpretq_p64_u64(value), vreinterpretq_p64_u64(factors));
        return veorq_u64(veorq_u64(vreinterpretq_u64_p128(first), vreinterpretq_u64_p128(second)), addend);
    }
};

}  // namespace

#include "checksum/crc32c_folding.inl"

std::uint32_t smart_infinity::extend_crc32c_128(std::uint32_t crc, const unsigned char* data, std::size_t bytes) {
    return extend(crc, data, bytes);
}
