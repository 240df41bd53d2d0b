// The payload of a compressed gradient: a header of one beat, then parts, each padded with zeros to whole beats.
//
// Sparse: the number of kept elements in each block of 65,536 (uint32), their indices in the block (uint16, ascending),
// their values. Block-scaled: an exponent for each block of 256 elements (uint8), a code for each element (int8).
//
// Exponents take the path of indices, and codes the path of values.
#pragma once

#include "run.hpp"

namespace card {

constexpr std::uint32_t kBlock = 65536;  // elements of a tile on the chip, as many as a 16-bit index can address
constexpr std::uint32_t kMostBlocks = kLargestNumel / kBlock;
constexpr std::uint32_t kScaledBlock = 256;  // elements that share an exponent
constexpr std::uint32_t kSparseMagic = 0x4749534cu;
constexpr std::uint32_t kBlockScaledMagic = 0x4249534cu;
constexpr std::uint32_t kPayloadVersion = 1;

constexpr std::uint32_t kBeatBytes = 64;  // bytes in a beat
// Numbers of fp32 beats: from a beat of codes, in a block, and for a beat of exponents.
constexpr std::uint32_t kBeatsOfCodes = kBeatBytes / kLanes;
constexpr std::uint32_t kBeatsOfBlock = kScaledBlock / kLanes;
constexpr std::uint32_t kBeatsOfExponents = kBeatBytes * kBeatsOfBlock;

// Number of beats of indices that are fetched in one burst, before the values that belong to them (twice as many beats
// if they are fp32). Each stream holds a burst. (Not a burst of codes: they follow their beat of exponents and are used
// as they arrive.)
constexpr std::uint32_t kIndexBurst = 16;

// One part of the payload: indices or values.
struct Part {
    std::uint32_t offset;  // beats before it
    std::uint32_t beats;
    std::uint32_t burst;  // beats that are fetched before a burst of the other part
    // The run reads all beats and needs [begin, end) of them.
    std::uint32_t begin;
    std::uint32_t end;
};

struct Payload {
    std::uint32_t magic;
    std::uint32_t num_blocks;
    std::uint32_t numel;  // elements that are kept, or elements of a block
    std::uint32_t count_beats;
    Part indices;
    Part values;
};

inline std::uint32_t beats_of(std::uint32_t count, std::uint32_t per_beat) {
#pragma HLS INLINE
    return (count + per_beat - 1) / per_beat;
}

// Plans the payload of a run whose sparse gradient keeps `count` elements.
inline Payload plan_sparse(const Run& run, std::uint32_t count) {
#pragma HLS INLINE
    const bool wide = run.gradient_dtype == kFloat32;
    Payload payload;
    payload.magic = kSparseMagic;
    payload.num_blocks = beats_of(run.numel, kBlock);
    payload.numel = count;
    payload.count_beats = beats_of(payload.num_blocks, kLanes);
    const std::uint32_t index_beats = beats_of(count, kGroup);
    const std::uint32_t value_beats = beats_of(count, wide ? kLanes : kGroup);
    const std::uint32_t offset = 1 + payload.count_beats;
    payload.indices = {offset, index_beats, kIndexBurst, 0, index_beats};
    payload.values = {offset + index_beats, value_beats, wide ? 2 * kIndexBurst : kIndexBurst, 0, value_beats};
    return payload;
}

// Plans one beat of exponents, then the codes that belong to it. The run needs those of its own beats of fp32 only.
inline Payload plan_block_scaled(const Run& run) {
#pragma HLS INLINE
    Payload payload;
    payload.magic = kBlockScaledMagic;
    payload.num_blocks = beats_of(run.numel, kScaledBlock);
    payload.numel = kScaledBlock;
    payload.count_beats = 0;
    const std::uint32_t exponent_beats = beats_of(payload.num_blocks, kBeatBytes);
    payload.indices = {1, exponent_beats, 1, run.begin / kBeatsOfExponents, beats_of(run.end, kBeatsOfExponents)};
    payload.values = {1 + exponent_beats, beats_of(run.numel, kBeatBytes), kScaledBlock, run.begin / kBeatsOfCodes,
                      beats_of(run.end, kBeatsOfCodes)};
    return payload;
}

static_assert(kScaledBlock == kBeatsOfExponents / kBeatsOfCodes, "beats of codes to a beat of exponents");

inline Payload plan_payload(const Run& run, const Words& header) {
#pragma HLS INLINE
    return run.sparse ? plan_sparse(run, header[4]) : plan_block_scaled(run);
}

inline bool describes(const Words& header, const Run& run, const Payload& payload) {
#pragma HLS INLINE
    const bool same_parts = run.sparse ? header[6] == payload.count_beats && header[7] == payload.indices.beats &&
                                             header[8] == payload.values.beats
                                       : header[6] == payload.indices.beats && header[7] == payload.values.beats;
    return header[0] == payload.magic && header[1] == kPayloadVersion && header[2] == run.numel &&
           header[3] == payload.num_blocks && header[4] == payload.numel && header[5] == run.gradient_dtype &&
           same_parts && (payload.numel <= run.numel || run.block_scaled);
}

}  // namespace card
