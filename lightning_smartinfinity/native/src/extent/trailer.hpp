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
constexpr std::size_t kTrailerBytes = 128;
constexpr std::size_t kJobBytes = 16;

// The identity of a store; every extent contains it.
struct Identity {
    std::array<std::uint8_t, kJobBytes> job{};
    std::uint32_t rank = 0;
    std::uint32_t state_format = 0;

    const StateFormat& format() const { return checked_format(state_format); }
};

using Checksums = std::array<std::uint32_t, kMaxRegions>;

// The reason why a tasklet cannot be processed: its extent or its gradient was refused, or the device failed. `error`
// is as in Failure.
struct Refusal {
    FailureKind kind;
    std::string message;
    int error = 0;
};

// Checks that a trailer belongs to the extent that the tasklet expects. Returns the first problem, or nothing.
std::optional<Refusal> verify_trailer(const std::byte* trailer, const Identity& identity, const Tasklet& tasklet);

// The page after an extent's regions. Its last bytes are the trailer.
class TrailerPage {
 public:
    explicit TrailerPage(std::byte* page) : page_(page) {}

    std::optional<Refusal> verify(const Identity& identity, const Tasklet& tasklet) const {
        return verify_trailer(bytes(), identity, tasklet);
    }
    Checksums checksums() const;  // the regions' checksums
    void write(const Identity& identity, const Tasklet& tasklet, const Checksums& checksums) const;

 private:
    std::byte* bytes() const { return page_ + kTrailerPageBytes - kTrailerBytes; }

    std::byte* page_;
};

}  // namespace smart_infinity
