#include "kernels/update_step.hpp"

#include <cstring>

namespace smart_infinity {

StepWords words_of(const UpdateStep& step) {
    return std::visit(
        []<class Step>(const Step& scalars) {
            StepWords step;
            for (const auto& scalar : RuleOf<Step>::kScalars) {
                std::memcpy(&step.words[step.count++], &(scalars.*scalar.value), sizeof(float));
            }
            return step;
        },
        step);
}

const UpdateRule& rule_of(const UpdateStep& step) {
    return std::visit([]<class Step>(const Step&) -> const UpdateRule& { return RuleOf<Step>::kRule; }, step);
}

}  // namespace smart_infinity
