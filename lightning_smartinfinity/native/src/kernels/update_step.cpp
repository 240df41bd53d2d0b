#include "kernels/update_step.hpp"

#include <cstring>
#include <initializer_list>

namespace smart_infinity {
namespace {

constexpr UpdateRule kRules[] = {
    {"AdamStep", "master, exp_avg and exp_avg_sq", 3},
    {"AdagradStep", "master and sum", 2},
    {"SgdStep", "master and momentum_buffer", 2},
};
static_assert(sizeof kRules / sizeof *kRules == std::variant_size_v<UpdateStep>, "one for each alternative");

StepWords bits_of(std::initializer_list<float> scalars) {
    static_assert(sizeof(float) == sizeof(std::uint32_t));
    StepWords step;
    for (const float scalar : scalars) std::memcpy(&step.words[step.count++], &scalar, sizeof scalar);
    return step;
}

}  // namespace

StepWords words_of(const AdamStep& step) {
    return bits_of({step.gradient_scale, step.one_minus_beta1, step.beta2, step.one_minus_beta2, step.decay, step.l2,
                    step.step_size, step.inverse_sqrt_bias_correction2, step.eps});
}

StepWords words_of(const AdagradStep& step) {
    return bits_of({step.gradient_scale, step.weight_decay, step.step_size, step.eps});
}

StepWords words_of(const SgdStep& step) {
    return bits_of({step.gradient_scale, step.weight_decay, step.buffer_coefficient, step.gradient_coefficient,
                    step.nesterov_momentum, step.lr});
}

StepWords words_of(const UpdateStep& step) {
    return std::visit([](const auto& scalars) { return words_of(scalars); }, step);
}

const UpdateRule& rule_of(const UpdateStep& step) { return kRules[step.index()]; }

}  // namespace smart_infinity
