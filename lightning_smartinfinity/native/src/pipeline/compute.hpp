#pragma once

#include <cstddef>
#include <optional>

#include "extent/batch.hpp"
#include "extent/extent.hpp"

namespace smart_infinity {

// Checks of an extent in addition to the operation: verify it if it came from storage, seal it if it will be written.
struct Guards {
    bool verifies = true;
    bool seals = true;
};

// Processes a tasklet whose extent has been read into `buffer` (unless the operation reads nothing): verifies it,
// applies the operation to every segment, writes parameters and arrays out, and seals the extent for writing. Returns
// why the extent is refused, or nothing; if refused, nothing has been written out. Parameters are at the segments'
// addresses or, with a `slot`, at their offsets in it. `guards` can skip verifying an extent that did not come from
// storage, and sealing one that will not be written.
std::optional<Refusal> compute(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                               std::byte* slot, Guards guards = {});

}  // namespace smart_infinity
