#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/update_step.hpp"

namespace smart_infinity {

// The update kernels of a card: what hls/ builds, as version 1 of its interface has it.
constexpr std::uint32_t kKernelInterface = 1;

constexpr std::size_t kLargestCardNumel = std::size_t{1} << 29;  // of a tasklet: kLargestNumel of the kernels

// In order of a kernel's arguments: gradient; each array to read; each array to write; parameter; status; numel, first,
// last, gradient form, parameter form, active; the words of the update rule. What is written may be what is read.
struct CardKernelType {
    const char* name;
    std::uint32_t number;  // as it calls itself in its status
    std::size_t num_arrays;
    std::size_t num_words;

    int gradient() const { return 0; }
    int array_in(std::size_t array) const { return static_cast<int>(1 + array); }
    int array_out(std::size_t array) const { return static_cast<int>(1 + num_arrays + array); }
    int parameter() const { return static_cast<int>(1 + 2 * num_arrays); }
    int status() const { return parameter() + 1; }
    int first_word() const { return parameter() + 2; }
    // In place of a step's words.
    StepWords no_step() const { return {{}, num_words}; }
    bool has(const UpdateStep& step) const { return step.index() + 1 == number; }
};

// Throws std::invalid_argument where there is none.
const CardKernelType& card_kernel_type(const std::string& name);

}  // namespace smart_infinity
