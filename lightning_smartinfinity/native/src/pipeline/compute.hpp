#pragma once

#include <cstddef>
#include <optional>

#include "extent/batch.hpp"
#include "extent/extent.hpp"

namespace smart_infinity {

// Checks to make on an extent besides the operation, if it comes from storage or goes there.
struct Guards {
    bool verifies = true;
    bool seals = true;
};

// Works a tasklet whose extent has been read into `buffer` (unless the operation reads nothing): verifies it, does the
// operation on every segment, writes parameters and arrays out, and seals the extent for writing. Returns why the
// extent is refused, if it is; then nothing has been written out. Parameters lie at the segments' addresses or, with a
// `slot`, at their offsets in it. An extent that did not come from storage need not be verified, and one that will not
// be written need not be sealed.
std::optional<Refusal> compute(const Batch& batch, const Tasklet& tasklet, const Identity& identity, std::byte* buffer,
                               std::byte* slot, Guards guards = {});

}  // namespace smart_infinity
