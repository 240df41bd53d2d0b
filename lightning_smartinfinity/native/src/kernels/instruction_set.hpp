#pragma once

#include <vector>

#include "kernels/kernels.hpp"

namespace smart_infinity {

enum class InstructionSet { kScalar, kAvx2, kAvx512 };

// Returns the sets that this CPU and operating system support, slowest first.
std::vector<InstructionSet> supported_instruction_sets();

// Selects the set that every thread uses from now on; at start it is the best one. Throws std::invalid_argument if it
// is unsupported.
void select_instruction_set(InstructionSet choice);
InstructionSet selected_instruction_set();

const Kernels& kernels();

}  // namespace smart_infinity
