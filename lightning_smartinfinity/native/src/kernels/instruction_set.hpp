#pragma once

#include <vector>

#include "kernels/kernels.hpp"

namespace smart_infinity {

enum class InstructionSet { kScalar, kAvx2, kAvx512 };

// Of this CPU and operating system, slowest first.
std::vector<InstructionSet> supported_instruction_sets();

// The one in use by every thread from now on; the best one at start. Throws std::invalid_argument if unsupported.
void select_instruction_set(InstructionSet choice);
InstructionSet selected_instruction_set();

const Kernels& kernels();

}  // namespace smart_infinity
