#pragma once

#include <atomic>
#include <vector>

#include "kernels/kernels.hpp"

namespace smart_infinity {

enum class InstructionSet { kScalar, kAvx2, kAvx512 };  // kScalar: what every CPU of its kind has; on ARM, NEON

// Returns the sets that this CPU and operating system support, slowest first.
std::vector<InstructionSet> supported_instruction_sets();

// The set that every thread uses; initially the fastest one. Only tests select another.
std::atomic<InstructionSet>& selected_instruction_set();

const Kernels& kernels();

}  // namespace smart_infinity
