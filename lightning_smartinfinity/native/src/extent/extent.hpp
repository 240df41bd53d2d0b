#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "extent/batch.hpp"
#include "extent/state_format.hpp"
#include "extent/trailer.hpp"

namespace smart_infinity {

inline const Blocks& blocks_of(const Tasklet& tasklet) { return tasklet.blocks ? *tasklet.blocks : Blocks::grid(); }

inline Regions regions_of(const StateFormat& format, const Tasklet& tasklet) {
    return Regions(format, tasklet.num_arrays, tasklet.numel, blocks_of(tasklet));
}

inline std::size_t extent_bytes(const Regions& regions) { return regions.total_bytes() + kTrailerPageBytes; }

// Returns the bytes at the start of an extent that a read skips, because the parameter contains the master or half of
// it.
inline std::size_t skipped_bytes(const StateFormat& format, const Tasklet& tasklet) {
    return tasklet.master_in_parameter ? regions_of(format, tasklet).offset(1) : 0;
}

// A tasklet's state in a ring buffer: its regions, then the page whose last bytes are the trailer.
class Extent {
 public:
    Extent(std::byte* data, const StateFormat& format, const Tasklet& tasklet)
        : data_(data), tasklet_(tasklet), regions_(regions_of(format, tasklet)) {}

    const Regions& regions() const { return regions_; }
    std::byte* region(std::size_t index) const { return data_ + regions_.offset(index); }
    std::uint32_t checksum(std::size_t region) const;

    // Checks that it is the extent that the tasklet expects, and that the regions from `first_region` on are intact
    // (the others were not read). Returns the first problem, or nothing.
    std::optional<Refusal> verify(const Identity& identity, std::size_t first_region) const;

    // Fills the padding with zeros, so that no data of another tasklet reaches storage, and writes the trailer.
    void seal(const Identity& identity, const Checksums& checksums) const;

 private:
    TrailerPage trailer_page() const { return TrailerPage(data_ + regions_.total_bytes()); }

    std::byte* data_;
    const Tasklet& tasklet_;
    Regions regions_;
};

}  // namespace smart_infinity
