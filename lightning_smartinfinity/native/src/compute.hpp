#pragma once

#include <cstddef>
#include <optional>

#include "batch.hpp"
#include "extent.hpp"

namespace smart_infinity {

// Works a tasklet whose extent has been read into `buffer` (unless the operation reads nothing): verifies it, does the
// operation on every segment, writes parameters and arrays out, and seals the extent for writing. Returns why the
// extent is refused, if it is; then nothing has been written out. Parameters lie at the segments' addresses, or, with a
// `slot`, at their offsets there.
std::optional<Refusal> compute(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                               std::byte* slot);

}  // namespace smart_infinity
