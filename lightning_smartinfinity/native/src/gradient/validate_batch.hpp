#pragma once

#include <cstddef>

#include "extent/batch.hpp"

namespace smart_infinity {

// Throws std::invalid_argument, which names the tasklet, unless a pipeline with this format, number of files and buffer
// size can process the batch.
void validate(const Batch& batch, const StateFormat& format, std::size_t num_files, std::size_t buffer_bytes);
// Throws the same unless residuals can be fed back from the batch's gradients and payloads.
void validate_gradients(const Batch& batch);

}  // namespace smart_infinity
