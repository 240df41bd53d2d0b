#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/dtype.hpp"

namespace smart_infinity {

// One part of a payload.
struct PayloadBytes {
    const std::byte* data;
    std::size_t bytes;
};

// The parts of a payload, consecutive and including padding. A card reports the checksum of each.
struct PayloadParts {
    std::size_t bytes() const { return header_and_counts.bytes + indices.bytes + values.bytes; }

    PayloadBytes header_and_counts;
    PayloadBytes indices;  // exponents, if block-scaled
    PayloadBytes values;   // codes, if block-scaled
};

// A tasklet's compressed gradient. It comes from outside, so reads are checked against its end, and no missing element
// is written.
class GradientPayload {
 public:
    GradientPayload() = default;
    GradientPayload(const GradientPayload&) = default;
    GradientPayload& operator=(const GradientPayload&) = default;
    virtual ~GradientPayload() = default;

    // Type of the values.
    virtual DType dtype() const = 0;
    // The form's number in the arguments of a card's kernels.
    virtual std::uint32_t card_form() const = 0;
    virtual PayloadParts parts() const = 0;
    // Checks everything that the header does not cover, and returns the first error.
    virtual std::optional<std::string> check() = 0;
    // Writes elements [first, last) in dense form. Requires a check() that found no error.
    virtual void decode(std::uint64_t first, std::uint64_t last, void* out) const = 0;
};

// Opens a payload of the form that its header names. Throws std::invalid_argument with the reason unless the header
// belongs to a payload with this number of bytes for a tasklet with this number of elements.
std::unique_ptr<GradientPayload> open_payload(const std::byte* payload, std::size_t bytes, std::uint64_t numel);

// Returns how many bytes of its memory the payload uses. Throws std::invalid_argument if the header is invalid.
std::size_t payload_bytes(const std::byte* memory, std::size_t capacity);

}  // namespace smart_infinity
