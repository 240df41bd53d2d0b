// Binds gradient codecs and the functions that use them.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/block_scaled.hpp"
#include "gradient/feed_back.hpp"
#include "gradient/top_k.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

void bind_top_k(nb::module_& m) {
    nb::class_<TopK, GradientCodec>(
        m, "TopK",
        "Sends the ceil(ratio * n) elements of largest magnitude of a tasklet's n, or fewer if all others are zero.\n\n"
        "Magnitudes compare as their fp32 bits (NaN is largest); among equals, the lower index comes first. Values\n"
        "are rounded to nearest, ties to even; finite values stay finite. A ratio of 1 sends zeros too, in the\n"
        "gradient's own type.\n\n"
        "Args:\n"
        "    ratio: Share of the elements that are sent, in (0, 1].\n"
        "    value_dtype: Type of the values that are sent; None is the gradient's.\n"
        "    exact: False selects by a magnitude that is estimated from a sample, if the sample is at most an eighth\n"
        "        of the elements (that is, from 12,800 elements to send on). The number of elements sent is then, at\n"
        "        four standard deviations, within a tenth of the wanted number, and never more than a tenth above.\n\n"
        "Raises:\n    ValueError: The ratio is not in (0, 1].")
        .def(
            "__init__",
            [](TopK* self, double ratio, std::optional<DType> value_dtype, bool exact) {
                new (self) TopK(ratio, value_dtype, exact ? Precision::kExact : Precision::kSampled);
            },
            nb::kw_only(), "ratio"_a, "value_dtype"_a = nb::none(), "exact"_a = true)
        .def_prop_ro("ratio", &TopK::ratio)
        .def_prop_ro("exact", [](const TopK& self) { return self.precision() == Precision::kExact; })
        .def("count", &TopK::count, "numel"_a, "Return how many of a tasklet's elements to send.");
}

void bind_gradient_codecs(nb::module_& m) {
    nb::class_<GradientCodec>(m, "GradientCodec", "A way to compress the gradient of a tasklet into a payload.")
        .def_prop_ro("name", &GradientCodec::name)
        .def("payload_bytes", &GradientCodec::payload_bytes, "numel"_a, "gradient_dtype"_a = DType::kFloat32,
             "Return the largest size of a tasklet's payload.")
        .def("value_dtype", &GradientCodec::value_dtype, "gradient_dtype"_a = DType::kFloat32,
             "Return the type of the values that a payload is read as.");
    bind_top_k(m);
    nb::class_<BlockScaled, GradientCodec>(
        m, "BlockScaled",
        "Sends every element in 8 bits: as a multiple, of at most 127, of a power of two for each block of 256.\n\n"
        "The error is at most a 127th of the block's largest magnitude (or 2**-127). Values are read as fp32 and\n"
        "are exact in bf16 too. Magnitudes above 127 * 2**121, and NaN, become 127 * 2**121.")
        .def(nb::init<>());
}

}  // namespace

void bind_gradients(nb::module_& m) {
    bind_gradient_codecs(m);
    m.def(
        "feed_back", &feed_back, "tasklets"_a, nb::kw_only(), "residual_scale"_a = 1.0f, "threads"_a = 1, WithoutGil(),
        "Update the residuals after a step whose gradients were compressed.\n\n"
        "With y = gradient + residual * residual_scale, and v the value that the payload sent for it (zero if none),\n"
        "each element that was updated gets residual = (y - v) / residual_scale. Padding and elements without a\n"
        "step keep their residual. Payloads are marked as fed back, so that a second call does nothing.\n\n"
        "Args:\n"
        "    tasklets: Tasklets of the step, with its gradients and the payloads that it wrote; those without a\n"
        "        residual are skipped.\n"
        "    residual_scale: Scale of the gradients.\n"
        "    threads: Number of threads that work at a time.\n\n"
        "Raises:\n    ValueError: A payload or a tasklet is invalid; no residual has changed.");
}

}  // namespace smart_infinity
