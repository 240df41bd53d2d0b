#include "tensor/range_allocator.hpp"

#include <algorithm>
#include <cassert>
#include <iterator>

namespace smart_infinity {

std::optional<std::uint64_t> RangeAllocator::allocate(std::uint64_t bytes) {
    const auto found =
        std::find_if(free_.begin(), free_.end(), [bytes](const auto& part) { return part.second >= bytes; });
    if (found == free_.end()) return std::nullopt;
    const auto [offset, length] = *found;
    free_.erase(found);
    if (length > bytes) free_.emplace(offset + bytes, length - bytes);
    taken_ += bytes;
    return offset;
}

void RangeAllocator::free(std::uint64_t offset, std::uint64_t bytes) {
    assert(bytes <= taken_ && offset + bytes <= size_);
    taken_ -= bytes;
    const auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + bytes) {
        bytes += next->second;
        free_.erase(next);
    }
    const auto after = free_.lower_bound(offset);
    if (after != free_.begin()) {
        const auto before = std::prev(after);
        if (before->first + before->second == offset) {
            before->second += bytes;
            return;
        }
    }
    free_.emplace(offset, bytes);
}

void RangeAllocator::grow(std::uint64_t bytes) {
    taken_ += bytes;
    size_ += bytes;
    free(size_ - bytes, bytes);
}

void RangeAllocator::shrink(std::uint64_t bytes) {
    assert(bytes <= free_tail());
    if (bytes == 0) return;
    const auto last = std::prev(free_.end());
    last->second -= bytes;
    if (last->second == 0) free_.erase(last);
    size_ -= bytes;
}

std::uint64_t RangeAllocator::free_tail() const {
    if (free_.empty()) return 0;
    const auto& [offset, length] = *free_.rbegin();
    return offset + length == size_ ? length : 0;
}

}  // namespace smart_infinity
