#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/dtype.hpp"

namespace smart_infinity {

// A part of a payload.
struct PayloadBytes {
    const std::byte* data;
    std::size_t bytes;
};

// The parts of a payload, whose checksums a card tells: padding included, one behind the other.
struct PayloadParts {
    std::size_t bytes() const { return header_and_counts.bytes + indices.bytes + values.bytes; }

    PayloadBytes header_and_counts;
    PayloadBytes indices;  // or exponents
    PayloadBytes values;   // or codes
};

// A tasklet's compressed gradient, which comes from outside: nothing is read past its end, nothing written that is not
// there.
class GradientPayload {
 public:
    GradientPayload() = default;
    GradientPayload(const GradientPayload&) = default;
    GradientPayload& operator=(const GradientPayload&) = default;
    virtual ~GradientPayload() = default;

    // Of the values.
    virtual DType dtype() const = 0;
    // As a card's kernels are told it.
    virtual std::uint32_t card_form() const = 0;
    virtual PayloadParts parts() const = 0;
    // Looks at all that the header does not say, and returns what is wrong with the first that is not in order.
    virtual std::optional<std::string> check() = 0;
    // After a check() that found nothing: elements [first, last), dense.
    virtual void decode(std::uint64_t first, std::uint64_t last, void* out) const = 0;
};

// Of whatever form its header says. Throws std::invalid_argument, saying why, unless that header is one of a payload of
// so many bytes for a tasklet of so many elements.
std::unique_ptr<GradientPayload> open_payload(const std::byte* payload, std::size_t bytes, std::uint64_t numel);

// What the payload takes of the memory that it was written to. Throws std::invalid_argument if its header says nothing
// that could be.
std::size_t payload_bytes(const std::byte* memory, std::size_t capacity);

}  // namespace smart_infinity
