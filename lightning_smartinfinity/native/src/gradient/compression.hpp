#pragma once

#include <optional>
#include <string>

#include "extent/batch.hpp"

namespace smart_infinity {

// Returns the type of the gradients of the segments that are updated; any 16-bit type if none is updated.
DType gradient_dtype_of(const Tasklet& tasklet);

// Returns why the batch's codec cannot compress a tasklet of the batch, whose segments are in order; without a codec,
// why the tasklet's residual cannot be fed back. Returns nothing if it can.
std::optional<std::string> problem_of_compression(const Batch& batch, const Tasklet& tasklet);

// Compresses the tasklet's gradient into its payload. Returns the tasklet for the update, which refers to the payload.
Tasklet compress(const Batch& batch, const Tasklet& tasklet);

}  // namespace smart_infinity
