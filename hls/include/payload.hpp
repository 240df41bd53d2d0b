// The payload of a compressed gradient: a header of one beat, how many elements each block of 65,536 keeps (uint32),
// their indices in the block (uint16, ascending), their values. Each part ends on a beat, filled up with zeros.
#pragma once

#include "run.hpp"

namespace card {

constexpr std::uint32_t kBlock = 65536;  // elements: a tile on the chip, and what 16 bits of index reach
constexpr std::uint32_t kMostBlocks = kLargestNumel / kBlock;
constexpr std::uint32_t kPayloadMagic = 0x4749534cu;
constexpr std::uint32_t kPayloadVersion = 1;

static_assert(kMostBlocks == 8192, "the depth of the stream of counts in the tops, which holds them all");

struct Payload {
    std::uint32_t num_blocks;
    std::uint32_t count;  // of elements
    std::uint32_t count_beats;
    std::uint32_t index_beats;
    std::uint32_t value_beats;
};

// Of a run with so many elements kept.
inline Payload plan_payload(const Run& run, std::uint32_t count) {
#pragma HLS INLINE
    const std::uint32_t per_beat = run.gradient_dtype == kFloat32 ? kLanes : kGroup;
    Payload payload;
    payload.num_blocks = (run.numel + kBlock - 1) / kBlock;
    payload.count = count;
    payload.count_beats = (payload.num_blocks + kLanes - 1) / kLanes;
    payload.index_beats = (count + kGroup - 1) / kGroup;
    payload.value_beats = (count + per_beat - 1) / per_beat;
    return payload;
}

inline bool describes(const Words& header, const Run& run, const Payload& payload) {
#pragma HLS INLINE
    return header[0] == kPayloadMagic && header[1] == kPayloadVersion && header[2] == run.numel &&
           header[3] == payload.num_blocks && payload.count <= run.numel && header[5] == run.gradient_dtype &&
           header[6] == payload.count_beats && header[7] == payload.index_beats && header[8] == payload.value_beats;
}

}  // namespace card
