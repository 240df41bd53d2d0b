#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "batch.hpp"
#include "buffer.hpp"
#include "failure.hpp"

namespace smart_infinity {

constexpr std::size_t kTrailerPageBytes = kBlockBytes;
constexpr std::size_t kJobBytes = 16;

constexpr std::size_t region_bytes(std::size_t numel) { return align_up(numel * sizeof(float), kBlockBytes); }

constexpr std::size_t extent_bytes(std::size_t numel, std::size_t num_arrays) {
    return num_arrays * region_bytes(numel) + kTrailerPageBytes;
}

// What every extent of a store must carry.
struct Identity {
    std::array<std::uint8_t, kJobBytes> job{};
    std::uint32_t rank = 0;
    std::uint32_t state_format = 0;
};

using Checksums = std::array<std::uint32_t, kMaxArrays>;

// Why an extent is refused.
struct Refusal {
    FailureKind kind;
    std::string message;
};

// A tasklet's state in a ring buffer: regions of fp32, then the page whose last bytes are the trailer.
class Extent {
 public:
    Extent(std::byte* data, const Tasklet& tasklet) : data_(data), tasklet_(tasklet) {}

    float* array(std::size_t index) const {
        return reinterpret_cast<float*>(data_ + index * region_bytes(tasklet_.numel));
    }
    std::uint32_t checksum(std::size_t index) const;

    // Whether it is the extent the tasklet expects, with intact arrays from `first_array` on (the others were not
    // read).
    std::optional<Refusal> verify(const Identity& identity, std::size_t first_array) const;

    // Fills the padding with zeros, so that no memory of another tasklet reaches storage, and writes the trailer.
    void seal(const Identity& identity, const Checksums& checksums) const;

 private:
    std::byte* data_;
    const Tasklet& tasklet_;
};

}  // namespace smart_infinity
