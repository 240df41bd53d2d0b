#include "extent/state_format.hpp"

namespace smart_infinity {
namespace {

constexpr std::size_t kExponentBytes = 2;  // of a block: one for each moment

}  // namespace

Regions::Regions(StateFormat format, std::size_t num_arrays, std::size_t numel, const Blocks& blocks)
    : numel_(numel), blocks_(blocks) {
    switch (format) {
        case StateFormat::kFp32:
            count_ = num_arrays;
            item_bytes_.fill(4);
            break;
        case StateFormat::kBf16:
            count_ = 3;
            item_bytes_ = {4, 2, 2};
            break;
        case StateFormat::kInt8:
            count_ = 4;
            item_bytes_ = {4, 1, 1, 0};
            break;
        case StateFormat::kInt8Remainder:
            count_ = 5;
            item_bytes_ = {2, 2, 1, 1, 0};
            break;
    }
    for (std::size_t region = 0; region < count_; ++region) {
        offsets_[region + 1] = offsets_[region] + align_up(bytes(region), kBlockBytes);
    }
}

std::size_t Regions::bytes_before(std::size_t region, std::size_t element) const {
    const std::size_t item = item_bytes_[region];
    return item != 0 ? element * item : blocks_.count(element) * kExponentBytes;
}

}  // namespace smart_infinity
