#include "gradient/selection.hpp"

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "kernels/instruction_set.hpp"

namespace smart_infinity {
namespace {

// Expected number of sampled elements among the wanted ones. Within four standard deviations, the number of selected
// elements differs by less than a tenth from the wanted number.
constexpr std::size_t kSampledHits = 1600;
constexpr std::uint64_t kLeastStride = 8;  // smallest stride at which sampling saves work
// The same if the sample gives only a first guess and the selection is exact.
constexpr std::size_t kGuessedHits = 128;
constexpr std::size_t kLineNumel = 16;  // elements of one cache line, sampled together

constexpr std::size_t kCandidateShare = 16;  // at most one in this many elements is a candidate
constexpr std::uint64_t kFewElements = 65536;

// Returns the position of a sample within its stride. It varies, so that a period in the gradient cannot coincide with
// the period of the sample.
std::uint64_t jitter(std::uint64_t number, std::uint64_t stride) {
    return static_cast<std::uint32_t>(number * 0x9e3779b1u) % stride;
}

std::uint64_t sample_stride(std::size_t wanted) { return wanted / kSampledHits; }

// Returns the cut that selects `wanted` of these keys.
Cut cut_of(std::uint32_t* keys, std::size_t count, std::size_t wanted) {
    if (wanted >= count) return {};
    std::uint32_t* const last = keys + wanted;
    std::nth_element(keys, last - 1, keys + count, std::greater<>());
    const std::uint32_t key = last[-1];
    if (key == 0) return {};
    const auto above = std::count_if(keys, last, [key](std::uint32_t other) { return other > key; });
    return {key, wanted - static_cast<std::size_t>(above)};
}

// Returns a magnitude that probably somewhat more than `wanted` elements reach.
std::uint32_t guessed_least(const GradientSource& source, std::size_t wanted) {
    const std::uint64_t numel = source.numel();
    if (wanted == 0) return 1;
    const std::uint64_t num_lines = kGuessedHits * numel / (wanted * kLineNumel) + 1;
    const std::uint64_t stride = numel / num_lines;
    if (stride < 4 * kLineNumel) return 1;
    std::vector<std::uint32_t> keys;
    keys.reserve(num_lines * kLineNumel);
    for (std::uint64_t number = 0; number < num_lines; ++number) {
        float line[kLineNumel];
        const std::uint64_t first = number * stride + jitter(number, stride - kLineNumel);
        source.read(first, first + kLineNumel, line);
        std::transform(line, line + kLineNumel, std::back_inserter(keys), key_of);
    }
    const std::size_t hits = keys.size() * wanted / numel;
    const std::size_t rank = hits + 5 * static_cast<std::size_t>(std::sqrt(static_cast<double>(hits))) + 8;
    return std::max(cut_of(keys.data(), keys.size(), rank).key, 1u);
}

Candidates candidates_from(const GradientSource& source, std::size_t wanted, std::uint32_t least) {
    Candidates candidates(wanted, least);
    source.for_each_chunk(
        [&](std::uint64_t first, std::size_t numel, const float* values) { candidates.add(first, values, numel); });
    candidates.finish();
    return candidates;
}

// The result of counting keys by a part of their bits: the part that contains the wanted-th largest key, and how many
// keys of this part are wanted.
struct Counted {
    std::uint32_t part;
    std::size_t wanted;
};

template <class PartOf>
Counted count_parts(const GradientSource& source, std::size_t num_parts, std::size_t wanted, const PartOf& part_of) {
    std::vector<std::uint32_t> counts(num_parts + 1);  // the last counts all other keys
    source.for_each_chunk([&](std::uint64_t, std::size_t numel, const float* values) {
        for (std::size_t i = 0; i < numel; ++i) ++counts[part_of(key_of(values[i]))];
    });
    std::size_t part = num_parts;
    while (part-- > 0) {
        if (counts[part] >= wanted) return {static_cast<std::uint32_t>(part), wanted};
        wanted -= counts[part];
    }
    return {0, 0};
}

}  // namespace

std::size_t Cut::take(std::uint32_t* elements, float* values, std::size_t count) {
    std::size_t taken = 0;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t found = key_of(values[i]);
        const bool is_tie = found == key && ties > 0;
        elements[taken] = elements[i];
        values[taken] = values[i];
        taken += found > key || is_tie;
        ties -= is_tie;
    }
    return taken;
}

bool Candidates::are_few(std::uint64_t numel, std::size_t wanted) {
    return numel <= kFewElements || wanted <= numel / kCandidateShare;
}

// The arrays are not initialised, since much of them may never be used.
Candidates::Candidates(std::size_t wanted, std::uint32_t least)
    : wanted_(wanted),
      capacity_(2 * wanted + 2 * GradientSource::kChunkNumel),
      least_(least),
      elements_(new std::uint32_t[capacity_]),
      values_(new float[capacity_]),
      keys_(new std::uint32_t[capacity_]) {}

void Candidates::add(std::uint64_t first, const float* values, std::size_t numel) {
    if (capacity_ - size_ < numel) keep_largest();
    size_ += kernels().collect(values, numel, least_, static_cast<std::uint32_t>(first), elements_.get() + size_,
                               values_.get() + size_);
}

// Later elements must be larger than the last kept one: among equals, the lower index comes first.
void Candidates::keep_largest() {
    if (size_ <= wanted_) return;
    std::transform(values_.get(), values_.get() + size_, keys_.get(), key_of);
    Cut cut = cut_of(keys_.get(), size_, wanted_);
    least_ = cut.key + 1;
    size_ = cut.take(elements_.get(), values_.get(), size_);
}

Candidates largest(const GradientSource& source, std::size_t wanted) {
    // If the sample was misleading, guess again for many more elements.
    for (std::size_t guessed = wanted;; guessed *= 8) {
        const std::uint32_t least = guessed_least(source, guessed);
        Candidates candidates = candidates_from(source, wanted, least);
        if (candidates.size() == wanted || least == 1) return candidates;
    }
}

Cut counted_cut(const GradientSource& source, std::size_t wanted) {
    constexpr std::uint32_t kUpper = 1 << 15;
    constexpr std::uint32_t kLower = 1 << 16;
    const Counted upper =
        count_parts(source, kUpper, wanted, [](std::uint32_t key) { return key == 0 ? kUpper : key >> 16; });
    if (upper.wanted == 0) return {};
    const Counted lower = count_parts(source, kLower, upper.wanted, [&](std::uint32_t key) {
        return key >> 16 == upper.part && key != 0 ? key & 0xffffu : kLower;
    });
    return {upper.part << 16 | lower.part, lower.wanted};
}

bool is_sampled(std::size_t wanted) { return sample_stride(wanted) >= kLeastStride; }

Cut sampled_cut(const GradientSource& source, std::size_t wanted) {
    const std::uint64_t numel = source.numel();
    const std::uint64_t stride = sample_stride(wanted);
    const std::uint64_t count = numel / stride;
    std::vector<std::uint32_t> keys(count);
    for (std::uint64_t number = 0; number < count; ++number) {
        float value;
        const std::uint64_t element = number * stride + jitter(number, stride);
        source.read(element, element + 1, &value);
        keys[number] = key_of(value);
    }
    const Cut cut = cut_of(keys.data(), count, wanted / stride);
    return {cut.key, cut.ties * stride};
}

std::size_t most_sent(std::size_t wanted, Precision precision) {
    return precision == Precision::kExact ? wanted : wanted + wanted / 10;
}

}  // namespace smart_infinity
