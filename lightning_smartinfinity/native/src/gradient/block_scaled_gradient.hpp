#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "gradient/gradient_payload.hpp"
#include "gradient/payload_header.hpp"

namespace smart_infinity {

// Sizes of the parts of a block-scaled gradient's payload, each padded to 64 bytes.
struct BlockScaledParts {
    explicit BlockScaledParts(std::uint64_t elements);

    PayloadHeader header() const;
    std::size_t codes_at() const { return kBeatBytes + exponent_bytes; }
    std::size_t bytes() const { return codes_at() + code_bytes; }

    std::uint64_t numel;
    std::size_t num_blocks;
    std::size_t exponent_bytes;
    std::size_t code_bytes;
};

// A payload of a header, an exponent for each block of 256 elements (kernels.hpp), and a signed 8-bit code for each
// element: the multiple of the block's power of two that is nearest to it.
class BlockScaledGradient final : public GradientPayload {
 public:
    // Reads the header, and throws, as the constructor of SparseGradient does.
    BlockScaledGradient(const std::byte* payload, std::size_t bytes, std::uint64_t numel);

    DType dtype() const override { return DType::kFloat32; }
    std::uint32_t card_form() const override { return kBlockScaledForm; }
    PayloadParts parts() const override;
    // Checks every exponent and code.
    std::optional<std::string> check() override;
    void decode(std::uint64_t first, std::uint64_t last, void* out) const override;

 private:
    const std::uint8_t* exponents() const;
    const std::int8_t* codes() const;

    const std::byte* payload_;
    BlockScaledParts parts_;
};

}  // namespace smart_infinity
