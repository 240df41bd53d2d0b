#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "kernels/kernels.hpp"

namespace smart_infinity {

// The scalars of any rule. The order is that of the kernels' numbers on a card, which begin with one.
using UpdateStep = std::variant<AdamStep, AdagradStep, SgdStep>;

constexpr std::size_t kMaxStepWords = 9;

// A rule's scalars as the card's kernel takes them: 32-bit words in the order of its arguments.
struct StepWords {
    std::array<std::uint32_t, kMaxStepWords> words{};
    std::size_t count = 0;
};

StepWords words_of(const AdamStep& step);
StepWords words_of(const AdagradStep& step);
StepWords words_of(const SgdStep& step);
StepWords words_of(const UpdateStep& step);

// How a rule is called, and what it keeps of each element.
struct UpdateRule {
    const char* step;  // name of the step's class
    const char* arrays;
    std::size_t num_arrays;
};

const UpdateRule& rule_of(const UpdateStep& step);

}  // namespace smart_infinity
