#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "extent/batch.hpp"

namespace smart_infinity {

// Neighbouring elements of a tasklet that one run of a kernel works, with one set of scalars.
struct CardRunPlan {
    std::uint32_t first;
    std::uint32_t last;
    std::int64_t step;                     // kNoStep: the elements pass through
    std::vector<const Segment*> segments;  // of a run that updates
};

// Runs whose gradients, and whose parameters, are of one type: they share the memory for them.
struct CardPass {
    DType gradient_dtype;
    DType parameter_dtype;
    std::vector<CardRunPlan> runs;
};

// Neighbouring elements that are updated, in any number of runs.
struct Stretch {
    std::uint32_t first;
    std::uint32_t last;
};

std::vector<Stretch> stretches_of(const CardPass& pass);

// Runs that cover every element of the tasklet, in order.
std::vector<CardPass> card_passes(const Tasklet& tasklet);

}  // namespace smart_infinity
