// CRC32C of everything that a kernel reads and writes, a beat at a time.
//
// The register's next value is linear in the register and the beat. The beat's part is a feed-forward network that can
// be pipelined freely; only the register's own part, 32 bits into 32, closes the loop. Elements of the first and the
// last beat that do not count are fed as zeros, and the register is rewound by as many bits: before the first beat and
// after the last.
#pragma once

#include "run.hpp"

#if !defined(__SYNTHESIS__) && defined(__SSE4_2__)
#include <nmmintrin.h>

#include <cstring>
#endif

namespace card {

constexpr std::uint32_t kPolynomial = 0x82f63b78u;  // the reflected polynomial

// Returns the register after one more zero bit.
constexpr std::uint32_t advanced(std::uint32_t crc) { return (crc >> 1) ^ ((crc & 1u) != 0 ? kPolynomial : 0u); }

// Returns the register before `num_bits` zero bits.
inline std::uint32_t rewound(std::uint32_t crc, std::uint32_t num_bits) {
bits:
    for (std::uint32_t bit = 0; bit < num_bits; ++bit) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 0 max = 992
        const bool was_odd = (crc >> 31) != 0;
        crc = was_odd ? (crc ^ kPolynomial) << 1 | 1u : crc << 1;
    }
    return crc;
}

// The change that each bit of a beat makes to the register by the end of the beat.
struct BeatColumns {
    std::uint32_t of[kLanes][32];
};

constexpr BeatColumns beat_columns() {
    BeatColumns columns = {};
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
        std::uint32_t crc = 1u << bit;
        for (std::uint32_t word = kLanes; word > 0; --word) {
            for (int step = 0; step < 32; ++step) crc = advanced(crc);
            columns.of[word - 1][bit] = crc;
        }
    }
    return columns;
}

constexpr BeatColumns kColumns = beat_columns();

inline std::uint32_t word_part(std::uint32_t value, std::uint32_t word) {
#pragma HLS INLINE
    std::uint32_t sum = 0;
bits:
    for (std::uint32_t bit = 0; bit < 32; ++bit) {
#pragma HLS UNROLL
        sum ^= kColumns.of[word][bit] & (0u - ((value >> bit) & 1u));
    }
    return sum;
}

inline std::uint32_t add_beat(std::uint32_t crc, const Words& beat) {
#pragma HLS INLINE
#if !defined(__SYNTHESIS__) && defined(__SSE4_2__)
    std::uint64_t pairs[kLanes / 2];
    std::memcpy(pairs, &beat, sizeof pairs);
    std::uint64_t state = crc;
    for (std::uint64_t pair : pairs) state = _mm_crc32_u64(state, pair);
    return static_cast<std::uint32_t>(state);
#else
    std::uint32_t sum = word_part(crc, 0);
words:
    for (std::uint32_t word = 0; word < kLanes; ++word) {
#pragma HLS UNROLL
        sum ^= word_part(beat[word], word);
    }
    return sum;
#endif
}

// The checksum of whole beats.
struct Checksum {
    std::uint32_t crc = ~0u;

    void add(const Words& beat) {
#pragma HLS INLINE
        crc = add_beat(crc, beat);
    }
    std::uint32_t value() const {
#pragma HLS INLINE
        return ~crc;
    }
};

// The checksum of the elements [first, last) of an array. It is fed all groups that contain some of them.
struct RangeChecksum {
    Run run;
    std::uint32_t item_bytes;
    std::uint32_t crc;

    RangeChecksum(const Run& checked_run, std::uint32_t bytes) : run(checked_run), item_bytes(bytes) {
#pragma HLS INLINE
        const std::uint32_t begin = run.begin * kLanes;
        crc = run.begin == run.end ? ~0u : rewound(~0u, (run.first - begin) * item_bytes * 8);
    }
    // Adds the beat with this number in the array.
    void add(const Words& words, std::uint32_t beat) {
#pragma HLS INLINE
        Words counted;
        const std::uint32_t per_word = item_bytes == 4 ? 1 : 2;
    lanes:
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
#pragma HLS UNROLL
            const std::uint32_t low = (beat * kLanes + lane) * per_word;
            const std::uint32_t high = low + per_word - 1;
            const std::uint32_t mask = (covers(run, low) ? 0xffffu : 0u) | (covers(run, high) ? 0xffff0000u : 0u);
            counted[lane] = words[lane] & mask;
        }
        crc = add_beat(crc, counted);
    }
    std::uint32_t value() const {
#pragma HLS INLINE
        const std::uint32_t end = run.end * kLanes;
        return ~(run.begin == run.end ? crc : rewound(crc, (end - run.last) * item_bytes * 8));
    }
};

}  // namespace card
