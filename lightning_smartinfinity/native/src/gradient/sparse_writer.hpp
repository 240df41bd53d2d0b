#pragma once

#include <cstddef>
#include <cstdint>

#include "gradient/sparse_gradient.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// Writes a sparse gradient's payload, from its lowest element up.
class SparseWriter {
 public:
    // Into memory for these parts, whose count is the most that will be sent.
    SparseWriter(std::byte* payload, const SparseParts& most);

    // Elements that follow those before; what is too much is not sent.
    void add(const std::uint32_t* elements, const float* values, std::size_t count);
    // Returns the payload's size.
    std::size_t finish();

 private:
    std::byte* payload_;
    SparseParts most_;
    std::uint32_t* counts_;
    std::uint16_t* indices_;
    std::byte* values_;
    std::size_t count_ = 0;
};

}  // namespace smart_infinity
