#pragma once

#include <optional>
#include <string>

#include "extent/batch.hpp"

namespace smart_infinity {

// Of the gradients of the segments that are updated. Where none is, one of the smallest: any type will do.
DType gradient_dtype_of(const Tasklet& tasklet);

// What keeps a tasklet of the batch, whose segments are in order, from being compressed by the batch's codec; or, for
// one without a codec, from having had its residual fed.
std::optional<std::string> problem_of_compression(const Batch& batch, const Tasklet& tasklet);

// The tasklet with its gradient compressed into its payload, as it is updated.
Tasklet compress(const Batch& batch, const Tasklet& tasklet);

}  // namespace smart_infinity
