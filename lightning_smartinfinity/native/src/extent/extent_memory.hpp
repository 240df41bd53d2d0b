#pragma once

#include <cstddef>
#include <vector>

#include "extent/batch.hpp"
#include "extent/extent.hpp"

namespace smart_infinity {

// The memory that holds a tasklet's extent while it is processed: its regions and its trailer page. The page follows
// the regions on storage, but may be elsewhere in memory.
struct ExtentMemory {
    std::byte* regions;
    std::byte* trailer_page;
};

inline ExtentMemory contiguous(std::byte* data, const Tasklet& tasklet) {
    return {data, data + tasklet.extent_bytes - kTrailerPageBytes};
}

// A part of an extent that is contiguous in memory and on storage.
struct ExtentPart {
    std::size_t offset;  // in the extent
    std::byte* data;
    std::size_t bytes;
};

constexpr std::size_t kMostParts = 2;

// Returns the parts of an extent to transfer, without the first `skipped` bytes of its regions.
inline std::vector<ExtentPart> parts_of(const Tasklet& tasklet, const ExtentMemory& memory, std::size_t skipped) {
    const std::size_t regions = tasklet.extent_bytes - kTrailerPageBytes;
    if (memory.trailer_page == memory.regions + regions) {
        return {{skipped, memory.regions + skipped, tasklet.extent_bytes - skipped}};
    }
    return {{skipped, memory.regions + skipped, regions - skipped}, {regions, memory.trailer_page, kTrailerPageBytes}};
}

}  // namespace smart_infinity
