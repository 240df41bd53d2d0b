#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/buffer.hpp"

namespace smart_infinity {

constexpr std::size_t kBeatBytes = 64;  // width of the ports through which a card's kernels read payloads

// Numbers of payload forms in a card's kernels. A sparse payload's number is combined with the type of its values.
constexpr std::uint32_t kSparseForm = 256;
constexpr std::uint32_t kBlockScaledForm = 512;

// The first beat of a payload, in 32-bit words. Every form has magic, version and number of elements and, from word
// kFirstPart on, the number of beats of each of the three parts that follow.
using PayloadHeader = std::array<std::uint32_t, kBeatBytes / sizeof(std::uint32_t)>;

static_assert(sizeof(PayloadHeader) == kBeatBytes);

constexpr std::size_t kFirstPart = 6;
constexpr std::uint32_t kSparseMagic = 0x4749534c;
constexpr std::uint32_t kBlockScaledMagic = 0x4249534c;
constexpr std::uint32_t kFedBackMagic = 0x4649534c;  // marks a payload that has been fed back and can no longer be read
constexpr std::uint32_t kPayloadVersion = 1;
constexpr std::uint64_t kLargestPayloadNumel = 0xffffffff;

inline void require_equal(const char* field, std::uint64_t found, std::uint64_t expected) {
    if (found == expected) return;
    throw std::invalid_argument(std::string(field) + " is " + std::to_string(found) + ", expected " +
                                std::to_string(expected));
}

inline PayloadHeader header_of(const std::byte* payload, std::size_t bytes) {
    if (bytes < sizeof(PayloadHeader)) {
        throw std::invalid_argument("a payload of " + std::to_string(bytes) + " bytes has no header");
    }
    PayloadHeader header;
    std::memcpy(&header, payload, sizeof header);
    return header;
}

inline std::uint32_t magic_of(const std::byte* payload, std::size_t bytes) { return header_of(payload, bytes)[0]; }

}  // namespace smart_infinity
