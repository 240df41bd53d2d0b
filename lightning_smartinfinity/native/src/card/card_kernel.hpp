#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/update_step.hpp"

namespace smart_infinity {

// The update kernels that hls/ builds for cards, with version 2 of their interface.
constexpr std::uint32_t kKernelInterface = 2;

constexpr std::size_t kLargestCardNumel = std::size_t{1} << 29;  // the kernels' kLargestNumel: elements of a tasklet

// The order of a kernel's arguments: gradient; each array to read; each array to write; parameter; status; numel,
// first, last, gradient form, parameter form, active; the words of the update rule. The same array may be read and
// written.
struct CardKernelType {
    const char* name;
    std::uint32_t number;  // the kernel's number in its status
    std::size_t num_arrays;
    std::size_t num_words;

    int gradient() const { return 0; }
    int array_in(std::size_t array) const { return static_cast<int>(1 + array); }
    int array_out(std::size_t array) const { return static_cast<int>(1 + num_arrays + array); }
    int parameter() const { return static_cast<int>(1 + 2 * num_arrays); }
    int status() const { return parameter() + 1; }
    int first_word() const { return parameter() + 2; }
    // Returns zeros for the words of a run without a step.
    StepWords no_step() const { return {{}, num_words}; }
    bool has(const UpdateStep& step) const { return rule_of(step).kernel_number == number; }
};

// Returns the kernel of this name. Throws std::invalid_argument if there is none.
CardKernelType card_kernel_type(const std::string& name);

}  // namespace smart_infinity
