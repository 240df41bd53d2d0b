// Binds the scalars of each optimizer's step.

#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "kernels/update_step.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

template <std::size_t>
using Float = float;

template <class Step>
concept Seeded = requires { &Step::seed; };

template <class Step, std::size_t... Index>
void bind_step(nb::module_& m, std::index_sequence<Index...>) {
    using Rule = RuleOf<Step>;
    constexpr const auto& kScalars = Rule::kScalars;
    const std::string words =
        std::string("Holds the scalars of one hyperparameter set at one step, as fp32.\n\n") + Rule::kFormula;
    nb::class_<Step> bound(m, Rule::kRule.step, words.c_str());
    if constexpr (Seeded<Step>) {
        bound.def(
            "__init__",
            [](Step* self, Float<Index>... scalars, std::uint32_t seed) { new (self) Step{scalars..., seed}; },
            nb::kw_only(), nb::arg(kScalars[Index].name)..., "seed"_a = 0);
        bound.def_ro("seed", &Step::seed);
    } else {
        bound.def(
            "__init__", [](Step* self, Float<Index>... scalars) { new (self) Step{scalars...}; }, nb::kw_only(),
            nb::arg(kScalars[Index].name)...);
    }
    (bound.def_ro(kScalars[Index].name, kScalars[Index].value), ...);
    bound.def_prop_ro(
        "words",
        [](const Step& step) {
            const StepWords words = words_of(step);
            return std::vector<std::uint32_t>(words.words.begin(),
                                              words.words.begin() + static_cast<std::ptrdiff_t>(words.count));
        },
        "The scalars as a card's kernel takes them: the bits of each scalar, in order.");
}

template <class... Steps>
struct Bindings {
    static void bind(nb::module_& m) {
        (bind_step<Steps>(m, std::make_index_sequence<RuleOf<Steps>::kRule.num_words>()), ...);
        const nb::object either = nb::module_::import_("typing").attr("Union");
        m.attr("UpdateStep") = either[nb::make_tuple(nb::type<Steps>()...)];
    }
};

}  // namespace

void bind_steps(nb::module_& m) { OfSteps<Bindings>::bind(m); }

}  // namespace smart_infinity
