#pragma once

#include <cstddef>
#include <vector>

#include "extent/batch.hpp"

namespace smart_infinity {

// After a step whose gradients were compressed: what the payloads did not send of each y (gradient_source.hpp) becomes
// the residual, e = (y - sent) / S. That of elements that were left out stays, and tasklets without one are passed by.
// Payloads, gradients and residuals are those of the step; `threads` work at a time, the calling one among them.
//
// Payloads are none any more afterwards, and are passed by if this is called again: so a caller that an interrupt kept
// from knowing that it was done does it once.
//
// Throws std::invalid_argument, naming the tasklet, where something cannot be; then no residual has changed.
void feed_back(const std::vector<Tasklet>& tasklets, float residual_scale, std::size_t threads);

}  // namespace smart_infinity
