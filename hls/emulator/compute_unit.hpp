#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

// The interface between the emulated card and a library of kernels: the library exports one function per kernel, named
// smart_infinity_compute_unit_<kernel> and made by SMART_INFINITY_COMPUTE_UNIT of dispatch.hpp.
namespace smart_infinity::emulator {

inline constexpr std::size_t kBeatBytes = 64;

struct PointerArgument {
    std::uint64_t address;        // on the card
    bool written;                 // whether the kernel's signature lets it write
    std::byte* memory = nullptr;  // where the kernel reaches it, set by DeviceMemory::map
};

// The card's memory as far as a run may reach it.
class DeviceMemory {
 public:
    // Maps all pointers of a run at once. Throws std::exception if a card would not accept one of them.
    virtual void map(std::span<PointerArgument> pointers) = 0;

 protected:
    ~DeviceMemory() = default;
};

// registers: the compute unit's register map, from its first word on.
using RunComputeUnit = void(std::span<const std::uint32_t> registers, DeviceMemory& memory);

}  // namespace smart_infinity::emulator
