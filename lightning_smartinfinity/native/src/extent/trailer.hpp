#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/buffer.hpp"
#include "base/failure.hpp"
#include "extent/batch.hpp"
#include "extent/state_format.hpp"

namespace smart_infinity {

constexpr std::size_t kTrailerPageBytes = kBlockBytes;
constexpr std::size_t kJobBytes = 16;

// What every extent of a store must carry.
struct Identity {
    std::array<std::uint8_t, kJobBytes> job{};
    std::uint32_t rank = 0;
    std::uint32_t state_format = 0;

    StateFormat format() const { return static_cast<StateFormat>(state_format); }
};

using Checksums = std::array<std::uint32_t, kMaxRegions>;

// Why a tasklet is not worked: its extent, or its gradient, is refused, or the device failed. `error` as in Failure.
struct Refusal {
    FailureKind kind;
    std::string message;
    int error = 0;
};

// The page behind an extent's regions, whose last bytes are the trailer.
class TrailerPage {
 public:
    explicit TrailerPage(std::byte* page) : page_(page) {}

    // Whether it belongs to the extent that the tasklet expects.
    std::optional<Refusal> verify(const Identity& identity, const Tasklet& tasklet) const;
    Checksums checksums() const;  // of the regions
    void write(const Identity& identity, const Tasklet& tasklet, const Checksums& checksums) const;

 private:
    std::byte* page_;
};

}  // namespace smart_infinity
