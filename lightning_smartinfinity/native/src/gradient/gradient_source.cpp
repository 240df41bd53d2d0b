#include "gradient/gradient_source.hpp"

#include <cstring>

#include "gradient/compression.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {

GradientSource::GradientSource(const Tasklet& tasklet, float residual_scale)
    : numel_(tasklet.numel),
      dtype_(gradient_dtype_of(tasklet)),
      residual_(reinterpret_cast<float*>(tasklet.residual)),
      scale_(residual_scale),
      kernels_(kernels()) {
    auto padding = tasklet.padding.begin();
    for (const Segment& segment : tasklet.segments) {
        if (segment.step == kNoStep) continue;
        std::uint64_t first = segment.offset;
        const std::uint64_t last = segment.offset + segment.numel;
        while (padding != tasklet.padding.end() && padding->first + padding->second <= first) ++padding;
        for (auto range = padding; range != tasklet.padding.end() && range->first < last; ++range) {
            add(segment, first, range->first);
            first = range->first + range->second;
        }
        add(segment, first, last);
    }
}

void GradientSource::add(const Segment& segment, std::uint64_t first, std::uint64_t last) {
    if (first >= last) return;
    const auto* const gradient = reinterpret_cast<const std::byte*>(segment.gradient);
    ranges_.push_back({first, last, gradient + (first - segment.offset) * item_bytes(dtype_)});
}

void GradientSource::read(std::uint64_t first, std::uint64_t last, float* out) const {
    std::memset(out, 0, (last - first) * sizeof *out);
    const auto ends_before = [](const Range& range, std::uint64_t element) { return range.last <= element; };
    auto range = std::lower_bound(ranges_.begin(), ranges_.end(), first, ends_before);
    for (; range != ranges_.end() && range->first < last; ++range) {
        const std::uint64_t begin = std::max(first, range->first);
        combine(*range, begin, std::min(last, range->last) - begin, out + (begin - first));
    }
}

void GradientSource::combine(const Range& range, std::uint64_t first, std::size_t numel, float* out) const {
    const auto kernel = kernels_.add_residual[static_cast<std::size_t>(dtype_)];
    const auto widen = kernels_.widen[static_cast<std::size_t>(dtype_)];
    const std::byte* const gradient = gradient_at(range, first);
    if (residual_ == nullptr) return widen(gradient, out, numel);
    kernel(gradient, residual_ + first, scale_, out, numel);
}

}  // namespace smart_infinity
