#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "extent/batch.hpp"

namespace smart_infinity {

// Consecutive elements of a tasklet that one run of a kernel updates, with one set of scalars.
struct RunRange {
    std::uint32_t first;
    std::uint32_t last;
    std::int64_t step;                     // kNoStep: the elements pass through
    std::vector<const Segment*> segments;  // empty if the elements pass through
};

// Runs with the same gradient type and the same parameter type, which share the card's memory for both.
struct CardPass {
    DType gradient_dtype;
    DType parameter_dtype;
    std::vector<RunRange> runs;
};

// Consecutive elements that are updated, in one run or more.
struct Stretch {
    std::uint32_t first;
    std::uint32_t last;
};

std::vector<Stretch> stretches_of(const CardPass& pass);

// Returns runs that cover every element of the tasklet, in order.
std::vector<CardPass> card_passes(const Tasklet& tasklet);

}  // namespace smart_infinity
