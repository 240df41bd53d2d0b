// Converts fp16, bf16 and 8-bit codes by integer logic: an operator for half may flush fp16 subnormals, and codes need
// no operator.
#pragma once

#include "beats.hpp"

namespace card {

// The values are part of the kernels' interface.
enum DType : std::uint32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2, kNumDTypes = 3 };

inline std::uint32_t bytes_of(std::uint32_t dtype) {
#pragma HLS INLINE
    return dtype == kFloat32 ? 4 : 2;
}

constexpr std::uint32_t kRebias = (127u - 15u) << 23;  // difference between the exponents of fp16 and of fp32

// Returns the bits of m * 2**-24 in fp32; m has ten bits.
inline std::uint32_t widen_fp16_subnormal(std::uint32_t m) {
#pragma HLS INLINE
    std::uint32_t mantissa = m;
    std::uint32_t shift = 0;
    // Shifts left until bit 10, the implicit one, is set.
normalise:
    for (std::uint32_t step = 8; step > 0; step /= 2) {
#pragma HLS UNROLL
        const bool fits = mantissa < (1u << (11 - step));
        mantissa = fits ? mantissa << step : mantissa;
        shift += fits ? step : 0;
    }
    return m == 0 ? 0 : ((113u - shift) << 23) | ((mantissa & 0x3ffu) << 13);
}

inline std::uint32_t widen_fp16(std::uint32_t half) {
#pragma HLS INLINE
    const std::uint32_t sign = (half & 0x8000u) << 16;
    const std::uint32_t magnitude = half & 0x7fffu;
    const std::uint32_t normal = (magnitude << 13) + kRebias;
    const std::uint32_t special = normal + kRebias;  // infinity and NaN: the exponent becomes all ones
    const std::uint32_t finite = magnitude < 0x400u ? widen_fp16_subnormal(magnitude) : normal;
    return sign | (magnitude >= 0x7c00u ? special : finite);
}

// Rounds a number below 2**-14 to the nearest multiple of 2**-24, ties to even.
inline std::uint32_t narrow_to_fp16_subnormal(std::uint32_t magnitude) {
#pragma HLS INLINE
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
    const std::uint32_t shift = exponent < 102 ? 24 : 126 - exponent;  // 14 to 24 unless all bits are lost
    const std::uint32_t half = 1u << (shift - 1);
    const std::uint32_t rounded = (mantissa + half - 1 + ((mantissa >> shift) & 1u)) >> shift;
    return exponent < 102 ? 0 : rounded;
}

inline std::uint32_t narrow_to_fp16(std::uint32_t bits) {
#pragma HLS INLINE
    const std::uint32_t sign = (bits >> 16) & 0x8000u;
    const std::uint32_t magnitude = bits & 0x7fffffffu;
    const std::uint32_t normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    const std::uint32_t finite = magnitude < 0x38800000u ? narrow_to_fp16_subnormal(magnitude) : normal;
    const std::uint32_t number = magnitude >= 0x477ff000u ? 0x7c00u : finite;  // 65520 and more round to infinity
    const std::uint32_t quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
    return sign | (magnitude > 0x7f800000u ? quiet_nan : number);
}

inline std::uint32_t narrow_to_bf16(std::uint32_t bits) {
#pragma HLS INLINE
    const std::uint32_t nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const std::uint32_t quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry a NaN's payload into infinity
    return (bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : nearest_even;
}

inline float widen_half(std::uint32_t half, std::uint32_t dtype) {
#pragma HLS INLINE
    return float_of(dtype == kFloat16 ? widen_fp16(half) : half << 16);
}

inline std::uint32_t narrow_to_half(float value, std::uint32_t dtype) {
#pragma HLS INLINE
    return dtype == kFloat16 ? narrow_to_fp16(bits_of(value)) : narrow_to_bf16(bits_of(value));
}

// Widens sixteen of the thirty-two numbers of a beat: the lower ones (part 0) or the upper ones.
inline Floats widen_part(const Words& halves, std::uint32_t part, std::uint32_t dtype) {
#pragma HLS INLINE
    Floats values;
lanes:
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
        values[lane] = widen_half(half_of(halves, part * kLanes + lane), dtype);
    }
    return values;
}

inline Words narrow_group(const Floats& lower, const Floats& upper, std::uint32_t dtype) {
#pragma HLS INLINE
    Words halves;
words:
    for (std::uint32_t word = 0; word < kLanes; ++word) {
#pragma HLS UNROLL
        const std::uint32_t lane = 2 * word % kLanes;
        const float even = word < kLanes / 2 ? lower[lane] : upper[lane];
        const float odd = word < kLanes / 2 ? lower[lane + 1] : upper[lane + 1];
        halves[word] = narrow_to_half(even, dtype) | narrow_to_half(odd, dtype) << 16;
    }
    return halves;
}

constexpr std::uint32_t kLargestScale = 248;  // 127 times this scale is finite
constexpr std::uint32_t kNoCode = 0x80;       // code -128, which is invalid

// Returns the bits of code * 2**(scale - 127) in fp32. The code is a signed byte other than kNoCode, the scale from 1
// to kLargestScale.
inline std::uint32_t scaled_code(std::uint32_t code, std::uint32_t scale) {
#pragma HLS INLINE
    const bool is_negative = (code & 0x80u) != 0;
    const std::uint32_t magnitude = is_negative ? 0x100u - code : code;
    std::uint32_t mantissa = magnitude;
    std::uint32_t shift = 0;
    // Shifts left until bit 6, the implicit one, is set.
normalise:
    for (std::uint32_t step = 4; step > 0; step /= 2) {
#pragma HLS UNROLL
        const bool fits = mantissa < (1u << (7 - step));
        mantissa = fits ? mantissa << step : mantissa;
        shift += fits ? step : 0;
    }
    const std::uint32_t number = ((scale + 6u - shift) << 23) | ((mantissa & 0x3fu) << 17);
    return (is_negative ? 0x80000000u : 0u) | (magnitude == 0 ? 0u : number);
}

}  // namespace card
