#include "card/card_kernel.hpp"

#include <stdexcept>

namespace smart_infinity {
namespace {

constexpr CardKernelType kTypes[] = {
    {"adamw_update", 1, 3, 9},
    {"adagrad_update", 2, 2, 4},
    {"sgd_update", 3, 2, 6},
};

}  // namespace

const CardKernelType& card_kernel_type(const std::string& name) {
    for (const CardKernelType& type : kTypes) {
        if (name == type.name) return type;
    }
    throw std::invalid_argument("CardOptions: there is no kernel '" + name + "'");
}

}  // namespace smart_infinity
