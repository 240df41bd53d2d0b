#include "card/card_kernel.hpp"

#include <stdexcept>

namespace smart_infinity {
namespace {

template <class... Steps>
struct Rules {
    static constexpr const UpdateRule* kAll[] = {&RuleOf<Steps>::kRule...};
};

}  // namespace

CardKernelType card_kernel_type(const std::string& name) {
    for (const UpdateRule* rule : OfSteps<Rules>::kAll) {
        if (name == rule->kernel) return {rule->kernel, rule->kernel_number, rule->num_arrays, rule->num_words};
    }
    throw std::invalid_argument("CardOptions: there is no kernel '" + name + "'");
}

}  // namespace smart_infinity
