#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "gradient/gradient_source.hpp"

namespace smart_infinity {

enum class Precision { kExact, kSampled };

// Returns the bits of a magnitude. Their order is the order of magnitudes, with NaN last.
inline std::uint32_t key_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits & 0x7fffffffu;
}

// Selects, in ascending order of elements, magnitudes above `key`, and the first `ties` magnitudes equal to it.
struct Cut {
    std::uint32_t key = 0;
    std::size_t ties = 0;

    // Returns the smallest key that can be selected.
    std::uint32_t least() const { return ties > 0 ? key : key + 1; }
    // Moves the selected elements to the front and returns their number. Decreases `ties`.
    std::size_t take(std::uint32_t* elements, float* values, std::size_t count);
};

// The elements seen so far that may be among the `wanted` largest, in ascending order.
class Candidates {
 public:
    // Returns whether candidates need far less memory than all elements would.
    static bool are_few(std::uint64_t numel, std::size_t wanted);

    // add() ignores magnitudes below `least`, which is above zero.
    Candidates(std::size_t wanted, std::uint32_t least);

    void add(std::uint64_t first, const float* values, std::size_t numel);
    // Ends the selection after the last add(): keeps only the `wanted` largest.
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

// Returns exactly the `wanted` elements of largest magnitude; fewer if all others are zero.
Candidates largest(const GradientSource& source, std::size_t wanted);
// Returns the cut for the same elements by counting, in two passes; used if there would be many candidates.
Cut counted_cut(const GradientSource& source, std::size_t wanted);

// Returns whether a sample would be so much smaller than the gradient that sampling saves work.
bool is_sampled(std::size_t wanted);
// Returns a cut that selects about `wanted` elements. Which elements are sampled depends only on the counts.
Cut sampled_cut(const GradientSource& source, std::size_t wanted);
// Returns the largest number of elements that may be sent.
std::size_t most_sent(std::size_t wanted, Precision precision);

}  // namespace smart_infinity
