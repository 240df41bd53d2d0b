#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "base/buffer.hpp"
#include "extent/blocks.hpp"

namespace smart_infinity {

// How an element's state lies in an extent. The numbers are on storage.
enum class StateFormat : std::uint32_t {
    kFp32,           // every array in fp32
    kBf16,           // master in fp32; exp_avg and exp_avg_sq in bf16
    kInt8,           // master in fp32; exp_avg and exp_avg_sq in 8-bit codes and an exponent per block
    kInt8Remainder,  // as kInt8; the master as its bf16 parameter and a 16-bit remainder
};

constexpr std::size_t kNumStateFormats = 4;
constexpr std::size_t kMaxRegions = 8;
constexpr std::size_t kMomentArrays = 3;  // master, exp_avg and exp_avg_sq: what formats other than fp32 hold

constexpr std::size_t kMaster = 0;
constexpr std::size_t kExpAvg = 1;
constexpr std::size_t kExpAvgSq = 2;

constexpr bool has_blocks(StateFormat format) { return format >= StateFormat::kInt8; }

// Where the bytes of a tasklet's elements are in its extent: block-aligned regions, one behind the other. The first is
// what an update need not read if the parameter holds it.
class Regions {
 public:
    Regions(StateFormat format, std::size_t num_arrays, std::size_t numel, const Blocks& blocks);

    std::size_t count() const { return count_; }
    std::size_t offset(std::size_t region) const { return offsets_[region]; }
    std::size_t bytes(std::size_t region) const { return bytes_before(region, numel_); }
    // Up to the next region.
    std::size_t padded_bytes(std::size_t region) const { return offsets_[region + 1] - offsets_[region]; }
    // Of the elements before `element`, which begins a block.
    std::size_t bytes_before(std::size_t region, std::size_t element) const;
    // Of all regions.
    std::size_t total_bytes() const { return offsets_[count_]; }

 private:
    std::size_t numel_;
    const Blocks& blocks_;
    std::size_t count_;
    std::array<std::size_t, kMaxRegions> item_bytes_{};  // 0: two bytes for each block
    std::array<std::size_t, kMaxRegions + 1> offsets_{};
};

}  // namespace smart_infinity
