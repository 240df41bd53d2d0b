#include "gradient/sparse_gradient.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "base/buffer.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument(problem);
}

template <class Item>
Item load(const std::byte* data, std::size_t index) {
    Item item;
    std::memcpy(&item, data + index * sizeof item, sizeof item);
    return item;
}

// Returns the parts that a header describes, after checking all of it except the sizes of the parts.
SparseParts parts_of(const PayloadHeader& header, std::uint64_t numel) {
    require_equal("the payload's magic", header[0], kSparseMagic);
    require_equal("the payload's version", header[1], kPayloadVersion);
    require_equal("the payload's number of elements", header[2], numel);
    require_equal("the payload's number of blocks", header[3], (numel + kSparseBlockNumel - 1) / kSparseBlockNumel);
    require(header[4] <= numel, "the payload has more values than there are elements: " + std::to_string(header[4]));
    require(header[5] < kNumDTypes, "there is no type of values " + std::to_string(header[5]));
    return SparseParts(numel, header[4], static_cast<DType>(header[5]));
}

}  // namespace

SparseParts::SparseParts(std::uint64_t elements, std::size_t sent, DType value_dtype)
    : numel(elements),
      num_blocks((elements + kSparseBlockNumel - 1) / kSparseBlockNumel),
      count(sent),
      dtype(value_dtype),
      count_bytes(align_up(num_blocks * sizeof(std::uint32_t), kBeatBytes)),
      index_bytes(align_up(count * sizeof(std::uint16_t), kBeatBytes)),
      value_bytes(align_up(count * item_bytes(dtype), kBeatBytes)) {}

PayloadHeader SparseParts::header() const {
    const auto word = [](std::size_t value) { return static_cast<std::uint32_t>(value); };
    return {kSparseMagic,
            kPayloadVersion,
            word(numel),
            word(num_blocks),
            word(count),
            static_cast<std::uint32_t>(dtype),
            word(count_bytes / kBeatBytes),
            word(index_bytes / kBeatBytes),
            word(value_bytes / kBeatBytes)};
}

SparseGradient::SparseGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel)
    : payload_(payload), parts_(parts_of(header_of(payload, bytes), numel)) {
    const PayloadHeader found = header_of(payload, bytes);
    const PayloadHeader expected = parts_.header();
    require_equal("the payload's beats of counts", found[kFirstPart], expected[kFirstPart]);
    require_equal("the payload's beats of indices", found[kFirstPart + 1], expected[kFirstPart + 1]);
    require_equal("the payload's beats of values", found[kFirstPart + 2], expected[kFirstPart + 2]);
    require_equal("the payload's size", bytes, parts_.bytes());
}

PayloadParts SparseGradient::parts() const {
    return {{payload_, parts_.indices_at()},
            {payload_ + parts_.indices_at(), parts_.index_bytes},
            {payload_ + parts_.values_at(), parts_.value_bytes}};
}

std::uint32_t SparseGradient::count_of(std::size_t block) const {
    return load<std::uint32_t>(payload_ + kBeatBytes, block);
}

std::uint16_t SparseGradient::index_at(std::size_t position) const {
    return load<std::uint16_t>(payload_ + parts_.indices_at(), position);
}

std::optional<std::string> SparseGradient::check() {
    if (auto problem = check_counts()) return problem;
    for (std::size_t block = 0; block < parts_.num_blocks; ++block) {
        if (auto problem = check_block(block)) return problem;
    }
    return std::nullopt;
}

std::optional<std::string> SparseGradient::check_counts() {
    starts_.assign(1, 0);
    for (std::size_t block = 0; block < parts_.num_blocks; ++block) {
        starts_.push_back(starts_.back() + count_of(block));
        if (starts_.back() > parts_.count) break;
    }
    if (starts_.size() == parts_.num_blocks + 1 && starts_.back() == parts_.count) return std::nullopt;
    return "its counts do not give the header's sum, " + std::to_string(parts_.count);
}

std::optional<std::string> SparseGradient::check_block(std::size_t block) const {
    const std::uint64_t numel = std::min(kSparseBlockNumel, parts_.numel - block * kSparseBlockNumel);
    std::int64_t before = -1;
    for (std::size_t position = starts_[block]; position < starts_[block + 1]; ++position) {
        const std::uint16_t index = index_at(position);
        if (index <= before || index >= numel) {
            return "index " + std::to_string(index) + " of block " + std::to_string(block) +
                   (index >= numel ? " is past the last element" : " is not above the one before");
        }
        before = index;
    }
    return std::nullopt;
}

// Returns the position of the first index that is not below the element.
std::size_t SparseGradient::position_of(std::uint64_t element) const {
    const std::size_t block = element / kSparseBlockNumel;
    if (block >= parts_.num_blocks) return parts_.count;
    std::size_t first = starts_[block];
    std::size_t last = starts_[block + 1];
    while (first < last) {
        const std::size_t middle = (first + last) / 2;
        if (index_at(middle) < element % kSparseBlockNumel) {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    return first;
}

void SparseGradient::decode(std::uint64_t first, std::uint64_t last, void* out) const {
    const std::size_t item = item_bytes(parts_.dtype);
    auto* const dense = static_cast<std::byte*>(out);
    std::memset(dense, 0, (last - first) * item);
    const std::size_t end = position_of(last);
    std::size_t block = first / kSparseBlockNumel;
    for (std::size_t position = position_of(first); position < end; ++position) {
        while (position >= starts_[block + 1]) ++block;
        const std::uint64_t element = block * kSparseBlockNumel + index_at(position);
        std::memcpy(dense + (element - first) * item, payload_ + parts_.values_at() + position * item, item);
    }
}

}  // namespace smart_infinity
