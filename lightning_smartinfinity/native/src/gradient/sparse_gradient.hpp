#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/dtype.hpp"
#include "gradient/gradient_payload.hpp"
#include "gradient/payload_header.hpp"

namespace smart_infinity {

// Number of elements that share a count: as many as a 16-bit index can address.
constexpr std::uint64_t kSparseBlockNumel = 65536;

// Sizes of the parts of a sparse gradient's payload, each padded to 64 bytes.
struct SparseParts {
    SparseParts(std::uint64_t elements, std::size_t sent, DType value_dtype);

    PayloadHeader header() const;
    std::size_t indices_at() const { return kBeatBytes + count_bytes; }
    std::size_t values_at() const { return indices_at() + index_bytes; }
    std::size_t bytes() const { return values_at() + value_bytes; }

    std::uint64_t numel;
    std::size_t num_blocks;
    std::size_t count;
    DType dtype;
    std::size_t count_bytes;
    std::size_t index_bytes;
    std::size_t value_bytes;
};

// The sent elements of a gradient. The payload consists of a header, the number of sent elements in each block of
// 65,536 elements, their ascending indices within their blocks, and their values. All other elements are zero.
class SparseGradient final : public GradientPayload {
 public:
    // Reads the header. Throws std::invalid_argument with the reason unless it belongs to a payload with this number of
    // bytes for a tasklet with this number of elements.
    SparseGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel);

    DType dtype() const override { return parts_.dtype; }
    std::uint32_t card_form() const override { return kSparseForm | static_cast<std::uint32_t>(parts_.dtype); }
    PayloadParts parts() const override;
    // Checks every count and index.
    std::optional<std::string> check() override;
    void decode(std::uint64_t first, std::uint64_t last, void* out) const override;

 private:
    std::uint32_t count_of(std::size_t block) const;
    std::uint16_t index_at(std::size_t position) const;
    std::optional<std::string> check_counts();
    std::optional<std::string> check_block(std::size_t block) const;
    std::size_t position_of(std::uint64_t element) const;

    const std::byte* payload_;
    SparseParts parts_;
    std::vector<std::size_t> starts_;  // by block: position of its first index; then the total
};

}  // namespace smart_infinity
