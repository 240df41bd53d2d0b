#pragma once

#include <cstddef>
#include <vector>

#include "extent/batch.hpp"

namespace smart_infinity {

// Updates the residuals after a step whose gradients were compressed: the part of each y (gradient_source.hpp) that was
// not sent becomes e = (y - sent) / S. Elements that are left out keep their residual; tasklets without a residual are
// skipped. Payloads, gradients and residuals are those of the step; `threads` threads work at a time, including the
// caller's.
//
// Marks the payloads as fed back, and skips marked ones: a caller that an interrupt kept from learning that the call
// finished may call again.
//
// Throws std::invalid_argument, naming the tasklet, for invalid input; then no residual has changed.
void feed_back(const std::vector<Tasklet>& tasklets, float residual_scale, std::size_t threads);

}  // namespace smart_infinity
