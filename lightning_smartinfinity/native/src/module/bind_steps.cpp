// The scalars of each optimizer's step.

#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/update_step.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

constexpr const char* kWords = "The scalars as a card's kernel takes them: the bits of each, in order.";

template <class Step>
std::vector<std::uint32_t> words_in_order(const Step& step) {
    const StepWords words = words_of(step);
    return {words.words.begin(), words.words.begin() + static_cast<std::ptrdiff_t>(words.count)};
}

void bind_adam_step(nb::module_& m) {
    nb::class_<AdamStep>(m, "AdamStep",
                         "The scalars of one hyperparameter set at one step, as fp32.\n\n"
                         "g = gradient * gradient_scale (+ l2 * p); m, v as in torch; p = p * decay\n"
                         "- step_size * (m / (sqrt(v) * inverse_sqrt_bias_correction2 + eps)). `seed` is the\n"
                         "number of the update: that of stochastic rounding, in the formats that have it.")
        .def(
            "__init__",
            [](AdamStep* self, float gradient_scale, float beta1, float one_minus_beta1, float beta2,
               float one_minus_beta2, float decay, float l2, float step_size, float inverse_sqrt_bias_correction2,
               float eps, std::uint32_t seed) {
                new (self) AdamStep{gradient_scale,
                                    beta1,
                                    one_minus_beta1,
                                    beta2,
                                    one_minus_beta2,
                                    decay,
                                    l2,
                                    step_size,
                                    inverse_sqrt_bias_correction2,
                                    eps,
                                    seed};
            },
            nb::kw_only(), "gradient_scale"_a, "beta1"_a, "one_minus_beta1"_a, "beta2"_a, "one_minus_beta2"_a,
            "decay"_a, "l2"_a, "step_size"_a, "inverse_sqrt_bias_correction2"_a, "eps"_a, "seed"_a = 0)
        .def_ro("gradient_scale", &AdamStep::gradient_scale)
        .def_ro("beta1", &AdamStep::beta1)
        .def_ro("one_minus_beta1", &AdamStep::one_minus_beta1)
        .def_ro("beta2", &AdamStep::beta2)
        .def_ro("one_minus_beta2", &AdamStep::one_minus_beta2)
        .def_ro("decay", &AdamStep::decay)
        .def_ro("l2", &AdamStep::l2)
        .def_ro("step_size", &AdamStep::step_size)
        .def_ro("inverse_sqrt_bias_correction2", &AdamStep::inverse_sqrt_bias_correction2)
        .def_ro("eps", &AdamStep::eps)
        .def_ro("seed", &AdamStep::seed)
        .def_prop_ro("words", &words_in_order<AdamStep>, kWords);
}

void bind_adagrad_step(nb::module_& m) {
    nb::class_<AdagradStep>(m, "AdagradStep",
                            "The scalars of one hyperparameter set at one step, as fp32.\n\n"
                            "g = gradient * gradient_scale (+ weight_decay * p); s = s + g * g;\n"
                            "p = p - step_size * (g / (sqrt(s) + eps)).")
        .def(
            "__init__",
            [](AdagradStep* self, float gradient_scale, float weight_decay, float step_size, float eps) {
                new (self) AdagradStep{gradient_scale, weight_decay, step_size, eps};
            },
            nb::kw_only(), "gradient_scale"_a, "weight_decay"_a, "step_size"_a, "eps"_a)
        .def_ro("gradient_scale", &AdagradStep::gradient_scale)
        .def_ro("weight_decay", &AdagradStep::weight_decay)
        .def_ro("step_size", &AdagradStep::step_size)
        .def_ro("eps", &AdagradStep::eps)
        .def_prop_ro("words", &words_in_order<AdagradStep>, kWords);
}

void bind_sgd_step(nb::module_& m) {
    nb::class_<SgdStep>(m, "SgdStep",
                        "The scalars of one hyperparameter set at one step, as fp32.\n\n"
                        "g = gradient * gradient_scale (+ weight_decay * p);\n"
                        "b = buffer_coefficient * b + gradient_coefficient * g;\n"
                        "p = p - lr * (g + nesterov_momentum * b), or, where that is 0, p - lr * b.\n"
                        "A buffer_coefficient of 0 forgets the buffer, even what is not finite in it.")
        .def(
            "__init__",
            [](SgdStep* self, float gradient_scale, float weight_decay, float buffer_coefficient,
               float gradient_coefficient, float nesterov_momentum, float lr) {
                new (self) SgdStep{gradient_scale,       weight_decay,      buffer_coefficient,
                                   gradient_coefficient, nesterov_momentum, lr};
            },
            nb::kw_only(), "gradient_scale"_a, "weight_decay"_a, "buffer_coefficient"_a, "gradient_coefficient"_a,
            "nesterov_momentum"_a, "lr"_a)
        .def_ro("gradient_scale", &SgdStep::gradient_scale)
        .def_ro("weight_decay", &SgdStep::weight_decay)
        .def_ro("buffer_coefficient", &SgdStep::buffer_coefficient)
        .def_ro("gradient_coefficient", &SgdStep::gradient_coefficient)
        .def_ro("nesterov_momentum", &SgdStep::nesterov_momentum)
        .def_ro("lr", &SgdStep::lr)
        .def_prop_ro("words", &words_in_order<SgdStep>, kWords);
}

}  // namespace

void bind_steps(nb::module_& m) {
    bind_adam_step(m);
    bind_adagrad_step(m);
    bind_sgd_step(m);
}

}  // namespace smart_infinity
