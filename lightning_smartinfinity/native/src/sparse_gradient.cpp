#include "sparse_gradient.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "buffer.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint32_t kMagic = 0x4749534c;
constexpr std::uint32_t kVersion = 1;

struct Header {
    std::uint32_t magic;
    std::uint32_t version;
    std::uint32_t numel;
    std::uint32_t num_blocks;
    std::uint32_t count;
    std::uint32_t dtype;
    std::uint32_t count_beats;
    std::uint32_t index_beats;
    std::uint32_t value_beats;
    std::array<std::uint32_t, 7> zero;
};

static_assert(sizeof(Header) == 64, "one beat");

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument(problem);
}

void require_equal(const char* field, std::uint64_t found, std::uint64_t expected) {
    require(found == expected,
            std::string(field) + " is " + std::to_string(found) + ", expected " + std::to_string(expected));
}

template <class Item>
Item load(const std::byte* data, std::size_t index) {
    Item item;
    std::memcpy(&item, data + index * sizeof item, sizeof item);
    return item;
}

}  // namespace

SparseGradient::SparseGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel)
    : payload_(payload), numel_(numel) {
    require(bytes >= sizeof(Header), "a payload of " + std::to_string(bytes) + " bytes has no header");
    const auto header = load<Header>(payload, 0);
    require_equal("the payload's magic", header.magic, kMagic);
    require_equal("the payload's version", header.version, kVersion);
    require_equal("the payload's number of elements", header.numel, numel);
    num_blocks_ = (numel + kBlockNumel - 1) / kBlockNumel;
    require_equal("the payload's number of blocks", header.num_blocks, num_blocks_);
    count_ = header.count;
    require(count_ <= numel, "the payload has more values than there are elements: " + std::to_string(count_));
    require(header.dtype < kNumDTypes, "there is no type of values " + std::to_string(header.dtype));
    dtype_ = static_cast<DType>(header.dtype);
    count_bytes_ = align_up(num_blocks_ * sizeof(std::uint32_t), kBeatBytes);
    index_bytes_ = align_up(count_ * sizeof(std::uint16_t), kBeatBytes);
    value_bytes_ = align_up(count_ * item_bytes(dtype_), kBeatBytes);
    require_equal("the payload's beats of counts", header.count_beats, count_bytes_ / kBeatBytes);
    require_equal("the payload's beats of indices", header.index_beats, index_bytes_ / kBeatBytes);
    require_equal("the payload's beats of values", header.value_beats, value_bytes_ / kBeatBytes);
    require_equal("the payload's size", bytes, this->bytes());
}

std::uint32_t SparseGradient::count_of(std::size_t block) const {
    return load<std::uint32_t>(payload_ + kBeatBytes, block);
}

std::uint16_t SparseGradient::index_at(std::size_t position) const {
    return load<std::uint16_t>(indices().data, position);
}

std::optional<std::string> SparseGradient::check() {
    if (auto problem = check_counts()) return problem;
    for (std::size_t block = 0; block < num_blocks_; ++block) {
        if (auto problem = check_block(block)) return problem;
    }
    return std::nullopt;
}

std::optional<std::string> SparseGradient::check_counts() {
    starts_.assign(1, 0);
    for (std::size_t block = 0; block < num_blocks_; ++block) {
        starts_.push_back(starts_.back() + count_of(block));
        if (starts_.back() > count_) break;
    }
    if (starts_.size() == num_blocks_ + 1 && starts_.back() == count_) return std::nullopt;
    return "its counts do not give the header's sum, " + std::to_string(count_);
}

std::optional<std::string> SparseGradient::check_block(std::size_t block) const {
    const std::uint64_t numel = std::min(kBlockNumel, numel_ - block * kBlockNumel);
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

// Of the first index that is not below the element.
std::size_t SparseGradient::position_of(std::uint64_t element) const {
    const std::size_t block = element / kBlockNumel;
    if (block >= num_blocks_) return count_;
    std::size_t first = starts_[block];
    std::size_t last = starts_[block + 1];
    while (first < last) {
        const std::size_t middle = (first + last) / 2;
        if (index_at(middle) < element % kBlockNumel) {
            first = middle + 1;
        } else {
            last = middle;
        }
    }
    return first;
}

void SparseGradient::decode(std::uint64_t first, std::uint64_t last, void* out) const {
    const std::size_t item = item_bytes(dtype_);
    auto* const dense = static_cast<std::byte*>(out);
    std::memset(dense, 0, (last - first) * item);
    const std::size_t end = position_of(last);
    std::size_t block = first / kBlockNumel;
    for (std::size_t position = position_of(first); position < end; ++position) {
        while (position >= starts_[block + 1]) ++block;
        const std::uint64_t element = block * kBlockNumel + index_at(position);
        std::memcpy(dense + (element - first) * item, values().data + position * item, item);
    }
}

}  // namespace smart_infinity
