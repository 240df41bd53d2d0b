#include <algorithm>
#include <optional>

#include "bindings.hpp"
#include "crc32c.hpp"
#include "flush_subnormals.hpp"
#include "instruction_set.hpp"
#include "kernels.hpp"

namespace smart_infinity {

void bind_kernels(nb::module_& m) {
    nb::enum_<DType>(m, "DType", "Type of gradients and parameters in memory.")
        .value("FLOAT32", DType::kFloat32)
        .value("FLOAT16", DType::kFloat16)
        .value("BFLOAT16", DType::kBFloat16);
    nb::enum_<InstructionSet>(m, "InstructionSet", "What the kernels were compiled for; all give the same bits.")
        .value("SCALAR", InstructionSet::kScalar)
        .value("AVX2", InstructionSet::kAvx2)
        .value("AVX512", InstructionSet::kAvx512);
    m.def("supported_instruction_sets", &supported_instruction_sets, "Of this CPU, slowest first.");
    m.def(
        "select_instruction_set",
        [](std::optional<InstructionSet> choice) {
            select_instruction_set(choice.value_or(supported_instruction_sets().back()));
            return selected_instruction_set();
        },
        "choice"_a.none(),
        "Use one from now on, in every thread; None is the best. Returns it.\n\n"
        "Raises:\n    ValueError: This CPU does not support it.");
    m.def(
        "crc32c",
        [](Address address, std::size_t nbytes, std::uint32_t value) {
            return crc32c(pointer_to(address), nbytes, value);
        },
        "address"_a, "nbytes"_a, "value"_a = 0, WithoutGil(),
        "CRC-32C of memory, continuing `value`: the CPU's instruction, or a table if SCALAR is selected.");
    m.def(
        "sum_of_squares",
        [](Address address, std::size_t numel, DType dtype) {
            const FlushSubnormals flush;
            return kernels().sum_of_squares[static_cast<std::size_t>(dtype)](pointer_to(address), numel);
        },
        "address"_a, "numel"_a, "dtype"_a, WithoutGil(),
        "In double precision and a fixed order: the same bits on every instruction set. Finite iff every element is.");
}

}  // namespace smart_infinity
