#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "batch.hpp"
#include "buffer.hpp"
#include "failure.hpp"
#include "state_format.hpp"

namespace smart_infinity {

constexpr std::size_t kTrailerPageBytes = kBlockBytes;
constexpr std::size_t kJobBytes = 16;

// Throws std::invalid_argument for a number that is no format's.
StateFormat checked_format(std::uint32_t number);

inline const Blocks& blocks_of(const Tasklet& tasklet) { return tasklet.blocks ? *tasklet.blocks : Blocks::grid(); }

inline Regions regions_of(StateFormat format, const Tasklet& tasklet) {
    return Regions(format, tasklet.num_arrays, tasklet.numel, blocks_of(tasklet));
}

inline std::size_t extent_bytes(const Regions& regions) { return regions.total_bytes() + kTrailerPageBytes; }

// Of an extent, that its tasklet's reading leaves out: the parameter is the master, or half of it.
inline std::size_t skipped_bytes(StateFormat format, const Tasklet& tasklet) {
    return tasklet.master_in_parameter ? regions_of(format, tasklet).offset(1) : 0;
}

// What every extent of a store must carry.
struct Identity {
    std::array<std::uint8_t, kJobBytes> job{};
    std::uint32_t rank = 0;
    std::uint32_t state_format = 0;

    StateFormat format() const { return static_cast<StateFormat>(state_format); }
};

using Checksums = std::array<std::uint32_t, kMaxRegions>;

// Why an extent is refused.
struct Refusal {
    FailureKind kind;
    std::string message;
};

// A tasklet's state in a ring buffer: its regions, then the page whose last bytes are the trailer.
class Extent {
 public:
    Extent(std::byte* data, StateFormat format, const Tasklet& tasklet)
        : data_(data), tasklet_(tasklet), regions_(regions_of(format, tasklet)) {}

    const Regions& regions() const { return regions_; }
    std::byte* region(std::size_t index) const { return data_ + regions_.offset(index); }
    std::uint32_t checksum(std::size_t region) const;

    // Whether it is the extent the tasklet expects, with intact regions from `first_region` on (the others were not
    // read).
    std::optional<Refusal> verify(const Identity& identity, std::size_t first_region) const;

    // Fills the padding with zeros, so that no memory of another tasklet reaches storage, and writes the trailer.
    void seal(const Identity& identity, const Checksums& checksums) const;

 private:
    std::byte* data_;
    const Tasklet& tasklet_;
    Regions regions_;
};

}  // namespace smart_infinity
