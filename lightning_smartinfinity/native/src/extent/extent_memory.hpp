#pragma once

#include <cstddef>
#include <vector>

#include "extent/batch.hpp"
#include "extent/extent.hpp"

namespace smart_infinity {

// Where a tasklet's extent lies while it is worked: its regions, and the page behind them on storage, which may lie
// elsewhere in memory.
struct ExtentMemory {
    std::byte* regions;
    std::byte* trailer_page;
};

inline ExtentMemory contiguous(std::byte* data, const Tasklet& tasklet) {
    return {data, data + tasklet.extent_bytes - kTrailerPageBytes};
}

// A part of an extent that is contiguous in memory too.
struct ExtentPiece {
    std::size_t offset;  // in the extent
    std::byte* data;
    std::size_t bytes;
};

constexpr std::size_t kMostPieces = 2;

// What is transferred of an extent, whose first `skipped` bytes, of its regions, are not.
inline std::vector<ExtentPiece> pieces_of(const Tasklet& tasklet, const ExtentMemory& memory, std::size_t skipped) {
    const std::size_t regions = tasklet.extent_bytes - kTrailerPageBytes;
    if (memory.trailer_page == memory.regions + regions) {
        return {{skipped, memory.regions + skipped, tasklet.extent_bytes - skipped}};
    }
    return {{skipped, memory.regions + skipped, regions - skipped}, {regions, memory.trailer_page, kTrailerPageBytes}};
}

}  // namespace smart_infinity
