// Gradient codecs, and what they are used for.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gradient/block_scaled.hpp"
#include "gradient/compression.hpp"
#include "gradient/feed_back.hpp"
#include "gradient/top_k.hpp"
#include "gradient/validate_batch.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

std::size_t encode(const std::shared_ptr<const GradientCodec>& codec, const Tasklet& tasklet, float residual_scale) {
    const Batch batch{Operation::kUpdate, {tasklet}, {}, nullptr, codec, residual_scale};
    validate_gradients(batch);
    return compress(batch, batch.tasklets.front()).payload_bytes;
}

void bind_top_k(nb::module_& m) {
    nb::class_<TopK, GradientCodec>(
        m, "TopK",
        "Sends the ceil(ratio * n) elements of largest magnitude of a tasklet's n, less where others are zero.\n\n"
        "In order of the magnitude's fp32 bits (NaN is largest), and of the index where they are equal. Values are\n"
        "rounded to nearest, ties to even; a finite one stays finite. A ratio of 1 sends zeros, too, in the\n"
        "gradient's own type.\n\n"
        "Args:\n"
        "    ratio: Of elements, in (0, 1].\n"
        "    value_dtype: Of what is sent; None is the gradient's.\n"
        "    exact: False chooses by a magnitude that is estimated from a sample, wherever this reads an eighth of "
        "the\n"
        "        elements at most (from 12,800 elements to send on): the number of elements sent is then, at four\n"
        "        standard deviations, within a tenth of that wanted, and never above it by more.\n\n"
        "Raises:\n    ValueError: The ratio is another.")
        .def(
            "__init__",
            [](TopK* self, double ratio, std::optional<DType> value_dtype, bool exact) {
                new (self) TopK(ratio, value_dtype, exact ? Precision::kExact : Precision::kSampled);
            },
            nb::kw_only(), "ratio"_a, "value_dtype"_a = nb::none(), "exact"_a = true)
        .def_prop_ro("ratio", &TopK::ratio)
        .def_prop_ro("exact", [](const TopK& self) { return self.precision() == Precision::kExact; })
        .def("count", &TopK::count, "numel"_a, "Elements to send of so many.");
}

void bind_gradient_codecs(nb::module_& m) {
    nb::class_<GradientCodec>(m, "GradientCodec", "A way to compress the gradient of a tasklet into a payload.")
        .def_prop_ro("name", &GradientCodec::name)
        .def("payload_bytes", &GradientCodec::payload_bytes, "numel"_a, "gradient_dtype"_a = DType::kFloat32,
             "The most that the payload of a tasklet takes.")
        .def("value_dtype", &GradientCodec::value_dtype, "gradient_dtype"_a = DType::kFloat32,
             "Type of the values that are read from a payload.");
    bind_top_k(m);
    nb::class_<BlockScaled, GradientCodec>(
        m, "BlockScaled",
        "Sends every element in 8 bits: as the nearest multiple, of 127 at most, of a power of two for each 256.\n\n"
        "The error is at most a 127th of the block's largest magnitude (or 2**-127). Values are read as fp32 and\n"
        "are exact in bf16, too. Magnitudes above 127 * 2**121, and NaN, become that.")
        .def(nb::init<>());
}

}  // namespace

void bind_gradients(nb::module_& m) {
    bind_gradient_codecs(m);
    m.def("encode_gradient", &encode, "codec"_a, "tasklet"_a, nb::kw_only(), "residual_scale"_a = 1.0f, WithoutGil(),
          "Compress a tasklet's gradient into its payload now, as UPDATE does for a batch with this codec.\n\n"
          "Returns:\n    Bytes of the payload.\n\n"
          "Raises:\n    ValueError: It cannot be compressed.");
    m.def("feed_back", &feed_back, "tasklets"_a, nb::kw_only(), "residual_scale"_a = 1.0f, "threads"_a = 1,
          WithoutGil(),
          "After a step whose gradients were compressed: what was not sent becomes the residual.\n\n"
          "With y = gradient + residual * residual_scale, and v what the payload sent of it (zero where nothing was),\n"
          "each element that was updated gets residual = (y - v) / residual_scale. Padding and elements without a\n"
          "step keep theirs. Payloads are used up: called again, it does nothing.\n\n"
          "Args:\n"
          "    tasklets: Of the step, with the payloads that it wrote and its gradients; those that have no residual\n"
          "        are passed by.\n"
          "    residual_scale: Of the gradients.\n"
          "    threads: That work at a time.\n\n"
          "Raises:\n    ValueError: A payload or a tasklet is not in order; no residual has changed.");
}

}  // namespace smart_infinity
