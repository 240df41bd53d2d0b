#pragma once

#include <cstddef>
#include <cstdint>

#include "gradient/sparse_gradient.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// Writes a sparse gradient's payload in ascending order of elements.
class SparseWriter {
 public:
    // Writes to memory with room for `most`, whose count is the largest number of elements to send.
    SparseWriter(std::byte* payload, const SparseParts& most);

    // Adds elements, which must be above all earlier ones; ignores elements beyond the largest number.
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
