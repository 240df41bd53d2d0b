#include "kernels/instruction_set.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

namespace smart_infinity {
namespace {

std::atomic<InstructionSet>& selection() {
    static std::atomic<InstructionSet> selected{supported_instruction_sets().back()};
    return selected;
}

}  // namespace

std::vector<InstructionSet> supported_instruction_sets() {
    std::vector<InstructionSet> sets{InstructionSet::kScalar};
#ifdef SMART_INFINITY_X86
    if (__builtin_cpu_supports("avx2")) sets.push_back(InstructionSet::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        sets.push_back(InstructionSet::kAvx512);
    }
#endif
    return sets;
}

void select_instruction_set(InstructionSet choice) {
    const auto sets = supported_instruction_sets();
    if (std::find(sets.begin(), sets.end(), choice) == sets.end()) {
        throw std::invalid_argument("select_instruction_set: this CPU does not support the chosen instruction set");
    }
    selection().store(choice, std::memory_order_relaxed);
}

InstructionSet selected_instruction_set() { return selection().load(std::memory_order_relaxed); }

const Kernels& kernels() {
#ifdef SMART_INFINITY_X86
    switch (selected_instruction_set()) {
        case InstructionSet::kAvx512:
            return kAvx512Kernels;
        case InstructionSet::kAvx2:
            return kAvx2Kernels;
        case InstructionSet::kScalar:
            break;
    }
#endif
    return kScalarKernels;
}

}  // namespace smart_infinity
