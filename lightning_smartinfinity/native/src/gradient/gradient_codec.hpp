#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/dtype.hpp"

namespace smart_infinity {

class GradientSource;

// A method to compress a tasklet's gradient into a payload, whose header defines how to read it (gradient_payload.hpp).
// The same gradient gives the same bytes on every instruction set and in every thread.
class GradientCodec {
 public:
    GradientCodec() = default;
    GradientCodec(const GradientCodec&) = delete;
    GradientCodec& operator=(const GradientCodec&) = delete;
    virtual ~GradientCodec() = default;

    virtual std::string name() const = 0;
    // Returns the largest size of a payload.
    virtual std::size_t payload_bytes(std::uint64_t numel, DType gradient_dtype) const = 0;
    // Returns the type to which a payload's values are decoded.
    virtual DType value_dtype(DType gradient_dtype) const = 0;
    // Writes the payload and returns its size.
    virtual std::size_t encode(const GradientSource& source, std::byte* payload) const = 0;
};

}  // namespace smart_infinity
