// Beats, which move through the kernels: 512 bits, each of sixteen words.
#pragma once

#include <hls_vector.h>

#include <cstdint>

namespace card {

constexpr std::uint32_t kLanes = 16;      // words in a beat
constexpr std::uint32_t kGroup = 32;      // elements in a beat of 16-bit numbers, or in two beats of fp32
constexpr std::uint32_t kPadding = 1024;  // arrays in card memory have a multiple of this many elements (4096 bytes)
constexpr std::uint32_t kLargestNumel = 1u << 29;  // elements; two arrays of this length fill the card's 4 GiB

using Floats = hls::vector<float, kLanes>;
using Words = hls::vector<std::uint32_t, kLanes>;

static_assert(sizeof(Floats) == 64 && sizeof(Words) == 64, "a beat is as wide as the memory ports, 512 bits");
static_assert(kGroup == 2 * kLanes, "a beat of 16-bit numbers widens to two of fp32");
static_assert(kPadding % kGroup == 0, "padding ends on a group");

inline std::uint32_t bits_of(float value) {
#pragma HLS INLINE
    union {
        float number;
        std::uint32_t bits;
    } same;
    same.number = value;
    return same.bits;
}

inline float float_of(std::uint32_t bits) {
#pragma HLS INLINE
    union {
        std::uint32_t bits;
        float number;
    } same;
    same.bits = bits;
    return same.number;
}

inline Words bits_of(const Floats& values) {
#pragma HLS INLINE
    Words words;
lanes:
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
        words[lane] = bits_of(values[lane]);
    }
    return words;
}

inline Floats floats_of(const Words& words) {
#pragma HLS INLINE
    Floats values;
lanes:
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
        values[lane] = float_of(words[lane]);
    }
    return values;
}

// Returns number 0 to 31 of a beat of 16-bit numbers.
inline std::uint32_t half_of(const Words& words, std::uint32_t number) {
#pragma HLS INLINE
    return (words[number / 2] >> (number % 2 * 16)) & 0xffffu;
}

// Returns number 0 to 63 of a beat of bytes.
inline std::uint32_t byte_of(const Words& words, std::uint32_t number) {
#pragma HLS INLINE
    return (words[number / 4] >> (number % 4 * 8)) & 0xffu;
}

}  // namespace card
