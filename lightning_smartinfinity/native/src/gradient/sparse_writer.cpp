#include "gradient/sparse_writer.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

struct SixteenBits {
    std::uint16_t infinity;  // positive
    std::uint16_t largest;
};

constexpr SixteenBits kFloat16{0x7c00, 0x7bff};
constexpr SixteenBits kBFloat16{0x7f80, 0x7f7f};

// Rounds to nearest, ties to even, but keeps finite values finite.
void round_to(DType dtype, const float* values, std::size_t count, std::byte* out) {
    kernels().narrow[static_cast<std::size_t>(dtype)](values, out, count);
    if (dtype == DType::kFloat32) return;
    const SixteenBits format = dtype == DType::kFloat16 ? kFloat16 : kBFloat16;
    auto* const rounded = reinterpret_cast<std::uint16_t*>(out);
    for (std::size_t i = 0; i < count; ++i) {
        const bool overflowed = (rounded[i] & 0x7fff) == format.infinity && std::isfinite(values[i]);
        rounded[i] = static_cast<std::uint16_t>(overflowed ? (rounded[i] & 0x8000) | format.largest : rounded[i]);
    }
}

}  // namespace

SparseWriter::SparseWriter(std::byte* payload, const SparseParts& most)
    : payload_(payload),
      most_(most),
      counts_(reinterpret_cast<std::uint32_t*>(payload + kBeatBytes)),
      indices_(reinterpret_cast<std::uint16_t*>(payload + most.indices_at())),
      values_(payload + most.values_at()) {
    std::memset(counts_, 0, most.count_bytes);
}

void SparseWriter::add(const std::uint32_t* elements, const float* values, std::size_t count) {
    count = std::min(count, most_.count - count_);
    for (std::size_t i = 0; i < count; ++i) {
        ++counts_[elements[i] / kSparseBlockNumel];
        indices_[count_ + i] = static_cast<std::uint16_t>(elements[i] % kSparseBlockNumel);
    }
    round_to(most_.dtype, values, count, values_ + count_ * item_bytes(most_.dtype));
    count_ += count;
}

// If fewer elements were added than there is room for, the values move forward.
std::size_t SparseWriter::finish() {
    const SparseParts parts(most_.numel, count_, most_.dtype);
    const std::size_t index_bytes = count_ * sizeof *indices_;
    const std::size_t value_bytes = count_ * item_bytes(most_.dtype);
    std::byte* const values = payload_ + parts.values_at();
    std::memmove(values, values_, value_bytes);
    std::memset(payload_ + parts.indices_at() + index_bytes, 0, parts.index_bytes - index_bytes);
    std::memset(values + value_bytes, 0, parts.value_bytes - value_bytes);
    const PayloadHeader header = parts.header();
    std::memcpy(payload_, &header, sizeof header);
    return parts.bytes();
}

}  // namespace smart_infinity
