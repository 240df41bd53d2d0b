#include "extent/state_format.hpp"

#include <stdexcept>
#include <string>

namespace smart_infinity {
namespace {

constexpr std::size_t kExponentBytes = 2;  // bytes per block, one for each moment

// Returns whether a row of the table is consistent.
constexpr bool is_consistent(const StateFormat& format, std::size_t index) {
    if (format.number != index || format.item_bytes.back() != 0) return false;
    return format.in_place() || format.item_bytes.front() == item_bytes(format.parameter_dtype);
}

constexpr bool is_table_consistent() {
    for (std::size_t index = 0; index < kNumStateFormats; ++index) {
        if (!is_consistent(kStateFormats[index], index)) return false;
    }
    return true;
}

static_assert(is_table_consistent(), "numbers are indices; the first region holds what the parameter does");

}  // namespace

const StateFormat& checked_format(std::uint32_t number) {
    if (number < kNumStateFormats) return kStateFormats[number];
    throw std::invalid_argument("Identity: there is no state format " + std::to_string(number));
}

Regions::Regions(const StateFormat& format, std::size_t num_arrays, std::size_t numel, const Blocks& blocks)
    : format_(format), numel_(numel), blocks_(blocks), count_(format.num_regions(num_arrays)) {
    for (std::size_t region = 0; region < count_; ++region) {
        offsets_[region + 1] = offsets_[region] + align_up(bytes(region), kBlockBytes);
    }
}

std::size_t Regions::bytes_before(std::size_t region, std::size_t element) const {
    const std::size_t item = format_.item_bytes_in(region);
    return item != 0 ? element * item : blocks_.count(element) * kExponentBytes;
}

std::size_t regions_bytes(const StateFormat& format, std::size_t num_arrays, std::size_t numel,
                          std::size_t num_blocks) {
    std::size_t total = 0;
    for (std::size_t region = 0; region < format.num_regions(num_arrays); ++region) {
        const std::size_t item = format.item_bytes_in(region);
        total += align_up(item != 0 ? numel * item : num_blocks * kExponentBytes, kBlockBytes);
    }
    return total;
}

}  // namespace smart_infinity
