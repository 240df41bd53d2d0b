#pragma once

#include <optional>

#include "gradient/gradient_codec.hpp"
#include "gradient/selection.hpp"

namespace smart_infinity {

// Sends the elements of largest magnitude as a sparse gradient (sparse_gradient.hpp): ceil(ratio * n) of a tasklet's n
// elements, or fewer if all others are zero. Magnitudes compare as their fp32 bits, so NaN precedes infinity; among
// equals, the lower index precedes. With a ratio of one, zeros are also sent, and values have the gradient's own type.
//
// Values are rounded to nearest, ties to even; finite values stay finite.
class TopK final : public GradientCodec {
 public:
    // Without a value type, values have the gradient's type. Throws std::invalid_argument unless 0 < ratio <= 1.
    TopK(double ratio, std::optional<DType> value_dtype, Precision precision);

    double ratio() const { return ratio_; }
    Precision precision() const { return precision_; }
    std::size_t count(std::uint64_t numel) const;

    std::string name() const override { return "TopK"; }
    std::size_t payload_bytes(std::uint64_t numel, DType gradient_dtype) const override;
    DType value_dtype(DType gradient_dtype) const override;
    std::size_t encode(const GradientSource& source, std::byte* payload) const override;

 private:
    bool sends_all() const { return ratio_ == 1; }

    double ratio_;
    std::optional<DType> value_dtype_;
    Precision precision_;
};

}  // namespace smart_infinity
