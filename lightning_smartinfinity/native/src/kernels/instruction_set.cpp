#include "kernels/instruction_set.hpp"

namespace smart_infinity {

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

std::atomic<InstructionSet>& selected_instruction_set() {
    static std::atomic<InstructionSet> selected{supported_instruction_sets().back()};
    return selected;
}

const Kernels& kernels() {
#ifdef SMART_INFINITY_X86
    switch (selected_instruction_set().load(std::memory_order_relaxed)) {
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
