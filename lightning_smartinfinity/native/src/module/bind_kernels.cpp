// Binds kernels, types and checksums.

#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "checksum/crc32c.hpp"
#include "kernels/instruction_set.hpp"
#include "kernels/kernels.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

std::vector<double> accumulate(const std::vector<Address>& gradients, const std::vector<Address>& sums,
                               const std::vector<std::size_t>& numels, const std::vector<bool>& adds,
                               DType gradient_dtype, DType dtype) {
    const std::size_t count = gradients.size();
    if (sums.size() != count || numels.size() != count || adds.size() != count) {
        throw std::invalid_argument("accumulate() needs as many of one as of the other");
    }
    const auto add = kernels().accumulate[static_cast<std::size_t>(gradient_dtype)][static_cast<std::size_t>(dtype)];
    std::vector<double> squares(count);
    for (std::size_t i = 0; i < count; ++i) {
        SquareSums running{};
        squares[i] = add(pointer_to(gradients[i]), reinterpret_cast<void*>(sums[i]), numels[i], adds[i], &running);
    }
    return squares;
}

}  // namespace

void bind_kernels(nb::module_& m) {
    nb::enum_<DType>(m, "DType", "Type of gradients and parameters in memory.")
        .value("FLOAT32", DType::kFloat32)
        .value("FLOAT16", DType::kFloat16)
        .value("BFLOAT16", DType::kBFloat16);
    m.def(
        "crc32c",
        [](Address address, std::size_t nbytes, std::uint32_t value) {
            return crc32c(pointer_to(address), nbytes, value);
        },
        "address"_a, "nbytes"_a, "value"_a = 0, WithoutGil(), "Return the CRC-32C of memory, continuing `value`.");
    m.def(
        "sum_of_squares",
        [](Address address, std::size_t numel, DType dtype) {
            SquareSums running{};
            return kernels().sum_of_squares[static_cast<std::size_t>(dtype)](pointer_to(address), numel, &running);
        },
        "address"_a, "numel"_a, "dtype"_a, WithoutGil(),
        "Return the sum in double precision, with the same bits on every instruction set; finite iff every element "
        "is.");
    m.def("accumulate", &accumulate, "gradients"_a, "sums"_a, "numels"_a, "adds"_a, "gradient_dtype"_a, "dtype"_a,
          WithoutGil(),
          "Store gradients as sums, or add them to sums, rounded as torch does; all in one pass over memory.\n\n"
          "Args:\n"
          "    gradients: Addresses of the gradients.\n"
          "    sums: Addresses of the sums; none overlaps its gradient.\n"
          "    numels: Number of elements of each gradient.\n"
          "    adds: Whether to add each gradient to its sum instead of storing it there.\n"
          "    gradient_dtype: Type of the gradients.\n"
          "    dtype: Type of the sums.\n\n"
          "Returns:\n    For each sum, the result of sum_of_squares().\n\n"
          "Raises:\n    ValueError: The lists differ in length.");
}

}  // namespace smart_infinity
