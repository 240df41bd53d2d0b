// Simulates one call of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace sim {

// `kernel` is the number in its status beat. `buffers` are gradient, the arrays, parameter and status, aligned to 64
// bytes; arrays are updated in place. `words` are the kernel's scalars. Returns the simulation's failure; empty if
// there was none.
std::string simulate(std::uint32_t kernel, void* const* buffers, const std::uint32_t* words);

}  // namespace sim
