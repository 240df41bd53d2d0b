// One call of a kernel in simulation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sim {

// The kernels by the number in their status beat.
std::size_t num_arrays(std::uint32_t kernel);

// `buffers` are gradient, the arrays, parameter and status, aligned to 64 bytes; arrays are updated in place. `words`
// are the kernel's scalars. Returns what went wrong in the simulation; empty if nothing did.
std::string simulate(std::uint32_t kernel, void* const* buffers, const std::uint32_t* words);

}  // namespace sim
