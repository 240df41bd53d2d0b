#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "card/card_kernel.hpp"

namespace smart_infinity {

constexpr std::uint32_t kStatusMagic = 0x5349534c;
constexpr std::size_t kMostCardArrays = 4;  // the beat has room for this many
static_assert(kMaxRuleArrays <= kMostCardArrays, "a kernel's status has a word for each array that it read or wrote");

// The status that a run writes, 64 bytes. Checksums are CRC-32C of the run's elements only.
struct CardStatus {
    std::uint32_t magic;
    std::uint16_t interface_version;
    std::uint16_t kernel;
    std::uint32_t count;
    std::uint32_t errors;
    std::uint32_t gradient;  // of a compressed gradient: over all beats of values or codes
    std::array<std::uint32_t, kMostCardArrays> arrays_read;
    std::uint32_t parameters;
    std::array<std::uint32_t, kMostCardArrays> arrays_written;
    std::uint32_t indices;            // over the beats of indices or exponents
    std::uint32_t header_and_counts;  // over the beats before the indices
};

static_assert(sizeof(CardStatus) == 64, "one beat");

// Checksums of a gradient as it was sent, named as in the status.
struct SentGradient {
    std::uint32_t gradient = 0;
    std::uint32_t indices = 0;
    std::uint32_t header_and_counts = 0;
};

// Returns what is wrong with the status of a run of `count` elements, or nothing.
std::optional<std::string> problem_of(const CardStatus& status, const CardKernelType& type, std::uint32_t count,
                                      const SentGradient& sent);

}  // namespace smart_infinity
