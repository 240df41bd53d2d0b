#pragma once

#include "gradient/gradient_codec.hpp"

namespace smart_infinity {

// Sends every element in 8 bits, as a block-scaled gradient (block_scaled_gradient.hpp).
//
// A block's scale is a power of two, and not the 127th part of its largest magnitude, which would halve the error at
// best: so values and what is left of them, y - v, are exact in fp32, v even in bf16; nothing but the exponent has to
// be sent, and hardware can apply it without multiplying.
//
// The error of an element is at most half the scale: a 127th of the block's largest magnitude, or 2**-127. Above
// 127 * 2**121 magnitudes are taken for that; NaN too.
class BlockScaled final : public GradientCodec {
 public:
    std::string name() const override { return "BlockScaled"; }
    std::size_t payload_bytes(std::uint64_t numel, DType gradient_dtype) const override;
    DType value_dtype(DType) const override { return DType::kFloat32; }
    std::size_t encode(const GradientSource& source, std::byte* payload) const override;
};

}  // namespace smart_infinity
