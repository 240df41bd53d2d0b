#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "gradient/gradient_source.hpp"

namespace smart_infinity {

enum class Precision { kExact, kSampled };

// The bits of a magnitude, which have its order; NaN comes last.
inline std::uint32_t key_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
}

// What is chosen, going from the lowest element up: magnitudes above `key`, and the first `ties` of those that equal
// it.
struct Cut {
    std::uint32_t key = 0;
    std::size_t ties = 0;

    // The least that may be chosen.
    std::uint32_t least() const { return ties > 0 ? key : key + 1; }
    // Moves what is chosen to the front, and returns how many that is. Counts down `ties`.
    std::size_t take(std::uint32_t* elements, float* values, std::size_t count);
};

// Elements that may be among the `wanted` largest of those seen so far, in order.
class Candidates {
 public:
    // Whether memory for them stays far below that of all elements.
    static bool are_few(std::uint64_t numel, std::size_t wanted);

    // Only magnitudes of at least `least`, which is above zero, will be looked at.
    Candidates(std::size_t wanted, std::uint32_t least);

    void add(std::uint64_t first, const float* values, std::size_t numel);
    // All are seen: what remains is the largest.
    void finish() { keep_largest(); }

    const std::uint32_t* elements() const { return elements_.get(); }
    const float* values() const { return values_.get(); }
    std::size_t size() const { return size_; }

 private:
    void keep_largest();

    std::size_t wanted_;
    std::size_t capacity_;
    std::uint32_t least_;
    std::size_t size_ = 0;
    std::unique_ptr<std::uint32_t[]> elements_;
    std::unique_ptr<float[]> values_;
    std::unique_ptr<std::uint32_t[]> keys_;
};

// The largest elements by their magnitudes, exactly; less than `wanted` where the others are zero.
Candidates largest(const GradientSource& source, std::size_t wanted);
// The same, where candidates would be many: by counting, in two passes.
Cut counted_cut(const GradientSource& source, std::size_t wanted);

// Whether a sample is so much smaller than the gradient that it saves work.
bool is_sampled(std::size_t wanted);
// Of about so many elements, by a sample of elements that depends on nothing but the numbers.
Cut sampled_cut(const GradientSource& source, std::size_t wanted);
// What is never exceeded.
std::size_t most_sent(std::size_t wanted, Precision precision);

}  // namespace smart_infinity
