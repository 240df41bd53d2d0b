#pragma once

#include "gradient/gradient_codec.hpp"

namespace smart_infinity {

// Sends every element in 8 bits, as a block-scaled gradient (block_scaled_gradient.hpp).
//
// A block's scale is a power of two. A 127th of the block's largest magnitude would at best halve the error. But with a
// power of two the values v and the remainders y - v are exact in fp32, and v even in bf16; only the exponent must be
// sent, and hardware applies it without multiplying.
//
// The error of an element is at most half the scale: at most a 127th of the block's largest magnitude, or 2**-127.
// Magnitudes above 127 * 2**121, and NaN, count as 127 * 2**121.
class BlockScaled final : public GradientCodec {
 public:
    std::string name() const override { return "BlockScaled"; }
    std::size_t payload_bytes(std::uint64_t numel, DType gradient_dtype) const override;
    DType value_dtype(DType) const override { return DType::kFloat32; }
    std::size_t encode(const GradientSource& source, std::byte* payload) const override;
};

}  // namespace smart_infinity
