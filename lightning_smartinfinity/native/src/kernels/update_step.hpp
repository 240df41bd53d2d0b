#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <variant>

#include "kernels/kernels.hpp"

namespace smart_infinity {

// The scalars of any rule.
using UpdateStep = OfSteps<std::variant>;

// A rule's scalars as a card's kernel receives them: 32-bit words in the order of its arguments.
struct StepWords {
    std::array<std::uint32_t, kMaxStepWords> words{};
    std::size_t count = 0;
};

StepWords words_of(const UpdateStep& step);

const UpdateRule& rule_of(const UpdateStep& step);

}  // namespace smart_infinity
