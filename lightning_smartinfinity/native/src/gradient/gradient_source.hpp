#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "extent/batch.hpp"
#include "kernels/kernels.hpp"

namespace smart_infinity {

// The values from which a tasklet's payload is made: y = g + e * S for each updated element, where g is its gradient,
// which is scaled by S, and e its unscaled residual, if any. Product and sum are each rounded to fp32; where e is zero,
// y is g itself. Padding, segments without a step, and elements outside all segments are excluded.
class GradientSource {
 public:
    // Requires that problem_of_compression() found no problem with the tasklet.
    GradientSource(const Tasklet& tasklet, float residual_scale);

    std::uint64_t numel() const { return numel_; }
    // Type of the gradients.
    DType dtype() const { return dtype_; }

    // Writes elements [first, last); excluded ones are zero.
    void read(std::uint64_t first, std::uint64_t last, float* out) const;

    // Calls visit(first, numel, values) for all elements that are not excluded, in order, at most kChunkNumel at a
    // time. visit may change the values.
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

    // Calls visit(first, numel, gradient, residual) in the same way, with the addresses of the stored numbers.
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
    // Elements [first, last), and the address of the first one's gradient.
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
    float* residual_;  // null: no residual
    float scale_;
    const Kernels& kernels_;
    std::vector<Range> ranges_;
};

}  // namespace smart_infinity
