#include "gradient/top_k.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <stdexcept>

#include "gradient/gradient_source.hpp"
#include "gradient/sparse_writer.hpp"
#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

void send_all(const GradientSource& source, SparseWriter& writer) {
    std::array<std::uint32_t, GradientSource::kChunkNumel> elements;
    source.for_each_chunk([&](std::uint64_t first, std::size_t numel, float* values) {
        std::iota(elements.begin(), elements.begin() + static_cast<std::ptrdiff_t>(numel),
                  static_cast<std::uint32_t>(first));
        writer.add(elements.data(), values, numel);
    });
}

// Sends the elements that a given cut selects.
void send_above(const GradientSource& source, Cut cut, SparseWriter& writer) {
    std::array<std::uint32_t, GradientSource::kChunkNumel> elements;
    std::array<float, GradientSource::kChunkNumel> found;
    const auto collect = kernels().collect;
    source.for_each_chunk([&](std::uint64_t first, std::size_t numel, const float* values) {
        const std::size_t count =
            collect(values, numel, cut.least(), static_cast<std::uint32_t>(first), elements.data(), found.data());
        writer.add(elements.data(), found.data(), cut.take(elements.data(), found.data(), count));
    });
}

}  // namespace

TopK::TopK(double ratio, std::optional<DType> value_dtype, Precision precision)
    : ratio_(ratio), value_dtype_(value_dtype), precision_(precision) {
    if (!(ratio > 0 && ratio <= 1)) {
        throw std::invalid_argument("TopK: ratio " + std::to_string(ratio) + " is not in (0, 1]");
    }
}

std::size_t TopK::count(std::uint64_t numel) const {
    const auto wanted = static_cast<std::uint64_t>(std::ceil(ratio_ * static_cast<double>(numel)));
    return std::min(wanted, numel);
}

std::size_t TopK::payload_bytes(std::uint64_t numel, DType gradient_dtype) const {
    const std::size_t most = std::min<std::size_t>(numel, most_sent(count(numel), precision_));
    return SparseParts(numel, most, value_dtype(gradient_dtype)).bytes();
}

DType TopK::value_dtype(DType gradient_dtype) const {
    return sends_all() ? gradient_dtype : value_dtype_.value_or(gradient_dtype);
}

std::size_t TopK::encode(const GradientSource& source, std::byte* payload) const {
    const std::size_t wanted = count(source.numel());
    const std::size_t most = std::min<std::size_t>(source.numel(), most_sent(wanted, precision_));
    SparseWriter writer(payload, SparseParts(source.numel(), most, value_dtype(source.dtype())));
    if (sends_all()) {
        send_all(source, writer);
    } else if (precision_ == Precision::kSampled && is_sampled(wanted)) {
        send_above(source, sampled_cut(source, wanted), writer);
    } else if (Candidates::are_few(source.numel(), wanted)) {
        Candidates candidates = largest(source, wanted);
        writer.add(candidates.elements(), candidates.values(), candidates.size());
    } else {
        send_above(source, counted_cut(source, wanted), writer);
    }
    return writer.finish();
}

}  // namespace smart_infinity
