#pragma once

#include <cstddef>
#include <vector>

#include "extent/batch.hpp"

namespace smart_infinity {

// Updates the residuals after a step whose gradients were compressed: the part of each y (gradient_source.hpp) that was
// not sent becomes e = (y - sent) / S. Excluded elements keep their residual; tasklets without a residual are skipped.
// Payloads, gradients and residuals must be those of the step. At most `threads` threads work at a time, including the
// caller's.
//
// Marks the payloads as fed back, and skips marked ones: if an interrupt hides from the caller that the call finished,
// it may call again.
//
// Throws std::invalid_argument, which names the tasklet, for invalid input; then no residual has changed.
void feed_back(const std::vector<Tasklet>& tasklets, float residual_scale, std::size_t threads);

}  // namespace smart_infinity
