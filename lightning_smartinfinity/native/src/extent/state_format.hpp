#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/buffer.hpp"
#include "base/dtype.hpp"
#include "extent/blocks.hpp"
#include "kernels/update_rules.hpp"

namespace smart_infinity {

constexpr std::size_t kMaxRegions = 8;
inline constexpr const UpdateRule& kMomentRule = RuleOf<AdamStep>::kRule;  // the only rule of all formats except fp32
constexpr std::size_t kMomentArrays = kMomentRule.num_arrays;

constexpr std::size_t kMaster = 0;
constexpr std::size_t kExpAvg = 1;
constexpr std::size_t kExpAvgSq = 2;

// How an extent stores the arrays after the master. Codec converts each kind to fp32 and back.
enum class Moments : std::uint8_t {
    kFp32,
    kBf16,
    kCodes,  // 8-bit codes, and an exponent per block
};

// Describes how an extent stores the state of its elements. The rest of the package uses only these traits of a format;
// Python reads them through the bindings.
struct StateFormat {
    std::uint32_t number;   // stored in every trailer
    std::string_view name;  // the name that users choose
    // Bytes per element in each region; all zero: every array is an fp32 region. Block exponents have one more region
    // after these.
    std::array<std::uint8_t, kMaxRegions> item_bytes;
    DType parameter_dtype;  // parameters of this dtype equal the first region, so steps need not read it
    Moments moments;
    const UpdateRule* rule;  // the only rule that the format supports; nullptr: every rule
    bool on_cards;           // whether SmartSSDs update it

    // Returns whether the master is split into a parameter of that type and a remainder. Parameters can then have no
    // other type.
    constexpr bool splits_master() const { return parameter_dtype != DType::kFloat32; }
    constexpr bool has_blocks() const { return moments == Moments::kCodes; }
    // Returns whether updates work on the regions themselves, since every array is stored as fp32.
    constexpr bool in_place() const { return moments == Moments::kFp32 && !splits_master(); }

    constexpr std::size_t num_regions(std::size_t num_arrays) const {
        if (in_place()) return num_arrays;
        std::size_t count = has_blocks() ? 1 : 0;
        for (const std::uint8_t bytes : item_bytes) count += bytes != 0;
        return count;
    }
    // Returns the bytes per element of a region; 0 for the region of exponents.
    constexpr std::size_t item_bytes_in(std::size_t region) const {
        return in_place() ? sizeof(float) : item_bytes[region];
    }
};

// A format's number is its index.
inline constexpr StateFormat kStateFormats[] = {
    {.number = 0,
     .name = "fp32",
     .item_bytes = {},
     .parameter_dtype = DType::kFloat32,
     .moments = Moments::kFp32,
     .rule = nullptr,
     .on_cards = true},
    {.number = 1,
     .name = "bf16",
     .item_bytes = {4, 2, 2},
     .parameter_dtype = DType::kFloat32,
     .moments = Moments::kBf16,
     .rule = &kMomentRule,
     .on_cards = false},
    {.number = 2,
     .name = "int8",
     .item_bytes = {4, 1, 1},
     .parameter_dtype = DType::kFloat32,
     .moments = Moments::kCodes,
     .rule = &kMomentRule,
     .on_cards = false},
    {.number = 3,
     .name = "int8_remainder",
     .item_bytes = {2, 2, 1, 1},
     .parameter_dtype = DType::kBFloat16,
     .moments = Moments::kCodes,
     .rule = &kMomentRule,
     .on_cards = false},
};
constexpr std::size_t kNumStateFormats = sizeof kStateFormats / sizeof *kStateFormats;
inline constexpr const StateFormat& kFp32 = kStateFormats[0];

// Returns the format with this number; throws std::invalid_argument if there is none.
const StateFormat& checked_format(std::uint32_t number);

// The consecutive, block-aligned regions of a tasklet's extent. An update need not read the first if the parameter
// contains it.
class Regions {
 public:
    Regions(const StateFormat& format, std::size_t num_arrays, std::size_t numel, const Blocks& blocks);

    std::size_t count() const { return count_; }
    std::size_t offset(std::size_t region) const { return offsets_[region]; }
    std::size_t bytes(std::size_t region) const { return bytes_before(region, numel_); }
    // Returns the bytes of a region including padding.
    std::size_t padded_bytes(std::size_t region) const { return offsets_[region + 1] - offsets_[region]; }
    // Returns the bytes of the elements before `element`, which must begin a block.
    std::size_t bytes_before(std::size_t region, std::size_t element) const;
    // Returns the bytes of all regions, padding included.
    std::size_t total_bytes() const { return offsets_[count_]; }

 private:
    const StateFormat& format_;
    std::size_t numel_;
    const Blocks& blocks_;
    std::size_t count_;
    std::array<std::size_t, kMaxRegions + 1> offsets_{};
};

// Returns the bytes of all regions, padding included, of a tasklet whose codes are in `num_blocks` blocks.
std::size_t regions_bytes(const StateFormat& format, std::size_t num_arrays, std::size_t numel, std::size_t num_blocks);

}  // namespace smart_infinity
