#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "extent/batch.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// What a tasklet's payload is made of: y = g + e * S of each element that is updated, where g is its gradient, scaled
// by S, and e its unscaled residual, if there is one. Multiplied and added one after the other, each rounded to fp32;
// where e is zero, y is g itself. Segments without a step, elements outside of all and padding are left out.
class GradientSource {
 public:
    // Of a tasklet for which problem_of_compression() found nothing.
    GradientSource(const Tasklet& tasklet, float residual_scale);

    std::uint64_t numel() const { return numel_; }
    // Of the gradients.
    DType dtype() const { return dtype_; }

    // Elements [first, last); those that are left out are zero.
    void read(std::uint64_t first, std::uint64_t last, float* out) const;

    // Calls visit(first, numel, values) for all that is not left out, in order and some thousand at a time; the values
    // may be changed.
    template <class Visit>
    void for_each_chunk(const Visit& visit) const {
        alignas(64) float values[kChunkNumel];
        for (const Range& range : ranges_) {
            for (std::uint64_t first = range.first; first < range.last; first += kChunkNumel) {
                const std::size_t numel = std::min<std::uint64_t>(range.last - first, kChunkNumel);
                combine(range, first, numel, values);
                visit(first, numel, values);
            }
        }
    }

    // Calls visit(first, numel, gradient, residual) in the same way, with addresses of what is stored.
    template <class Visit>
    void for_each_stored(const Visit& visit) const {
        for (const Range& range : ranges_) {
            for (std::uint64_t first = range.first; first < range.last; first += kChunkNumel) {
                const std::size_t numel = std::min<std::uint64_t>(range.last - first, kChunkNumel);
                visit(first, numel, gradient_at(range, first), residual_ + first);
            }
        }
    }

    static constexpr std::size_t kChunkNumel = 4096;  // stays in the first-level cache

 private:
    // Elements [first, last), with the address of the gradient of the first.
    struct Range {
        std::uint64_t first;
        std::uint64_t last;
        const std::byte* gradient;
    };

    void add(const Segment& segment, std::uint64_t first, std::uint64_t last);
    const std::byte* gradient_at(const Range& range, std::uint64_t element) const {
        return range.gradient + (element - range.first) * item_bytes(dtype_);
    }
    void combine(const Range& range, std::uint64_t first, std::size_t numel, float* out) const;

    std::uint64_t numel_;
    DType dtype_;
    float* residual_;  // null: none
    float scale_;
    const Kernels& kernels_;
    std::vector<Range> ranges_;
};

}  // namespace smart_infinity
