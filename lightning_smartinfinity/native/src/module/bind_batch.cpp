// What a batch consists of.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "extent/batch.hpp"
#include "gradient/gradient_codec.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

Segment make_segment(std::uint64_t offset, std::uint64_t numel, std::int64_t step, Address gradient,
                     DType gradient_dtype, Address parameter, DType parameter_dtype,
                     const std::vector<Address>& arrays) {
    if (arrays.size() > kMaxArrays) throw std::invalid_argument("Segment: more than 8 arrays");
    Segment segment{offset, numel, step, gradient, gradient_dtype, parameter, parameter_dtype, {}, arrays.size()};
    std::copy(arrays.begin(), arrays.end(), segment.arrays.begin());
    return segment;
}

Tasklet in_file(Tasklet tasklet, std::uint64_t file) {
    tasklet.read_file = tasklet.write_file = file;
    return tasklet;
}

Tasklet compressed(Tasklet tasklet, std::uint64_t payload_bytes, DType value_dtype) {
    tasklet.payload_bytes = payload_bytes;
    tasklet.residual = 0;
    tasklet.padding.clear();
    for (Segment& segment : tasklet.segments) {
        segment.gradient = 0;
        segment.gradient_dtype = value_dtype;
    }
    return tasklet;
}

nb::tuple arrays_of(const Segment& segment) {
    nb::list arrays;
    for (std::size_t index = 0; index < segment.num_arrays; ++index) arrays.append(segment.arrays[index]);
    return nb::tuple(arrays);
}

void bind_segment(nb::module_& m) {
    nb::class_<Segment>(
        m, "Segment",
        "Elements [offset, offset + numel) of a tasklet; addresses are those of the first element, 0 is none.\n\n"
        "step -1 carries the state over and leaves the parameter alone. `arrays` are fp32: the master and\n"
        "what the rule keeps (exp_avg, exp_avg_sq; sum; momentum_buffer). WRITE and MODIFY take the\n"
        "master from `parameter` if arrays[0] is 0.")
        .def(
            "__init__",
            [](Segment* self, std::uint64_t offset, std::uint64_t numel, std::int64_t step, Address gradient,
               DType gradient_dtype, Address parameter, DType parameter_dtype, const std::vector<Address>& arrays) {
                new (self) Segment(
                    make_segment(offset, numel, step, gradient, gradient_dtype, parameter, parameter_dtype, arrays));
            },
            nb::kw_only(), "offset"_a, "numel"_a, "step"_a = kNoStep, "gradient"_a = 0,
            "gradient_dtype"_a = DType::kFloat32, "parameter"_a = 0, "parameter_dtype"_a = DType::kFloat32,
            "arrays"_a = std::vector<Address>())
        .def_ro("offset", &Segment::offset)
        .def_ro("numel", &Segment::numel)
        .def_ro("step", &Segment::step)
        .def_ro("gradient", &Segment::gradient)
        .def_ro("gradient_dtype", &Segment::gradient_dtype)
        .def_ro("parameter", &Segment::parameter)
        .def_ro("parameter_dtype", &Segment::parameter_dtype)
        .def_prop_ro("arrays", &arrays_of, nb::sig("def arrays(self) -> tuple[int, ...]"));
}

void bind_operation(nb::module_& m) {
    nb::enum_<Operation>(m, "Operation", "What a batch does with every tasklet.")
        .value("UPDATE", Operation::kUpdate, "Read, optimizer update, parameters out, write at the other place.")
        .value("READ", Operation::kRead, "Read, copy arrays and the master (cast to the parameter) out.")
        .value("WRITE", Operation::kWrite, "Write arrays from memory; zeros where there is none.")
        .value("MODIFY", Operation::kModify, "Read, replace arrays from memory where there are some, write.");
}

void bind_blocks(nb::module_& m) {
    nb::class_<Blocks>(
        m, "Blocks",
        "How a tasklet's elements are cut into the blocks of 8-bit formats: at every multiple of 256 and\n"
        "at `borders`, elements that begin a parameter.")
        .def(nb::init<std::vector<std::uint64_t>>(), "borders"_a)
        .def("count", &Blocks::count, "numel"_a, "Blocks of a tasklet of this many elements.");
}

void bind_tasklet(nb::module_& m) {
    nb::class_<Tasklet>(
        m, "Tasklet",
        "One extent, read at one place and written at another, of the same file or not.\n"
        "Segments are in ascending "
        "order and do not overlap; elements outside are carried over\n"
        "(WRITE: zeros). With master_in_parameter (UPDATE; parameters of the format's parameter_dtype) the\n"
        "first region is not read: it is the parameter, and segments cover the whole tasklet.\n"
        "`offset` is that of the first element in the partition, a multiple of 256: stochastic rounding\n"
        "depends on it. `blocks` tells where parameters meet, for formats that have blocks. `payload` is the\n"
        "address of a compressed gradient, for segments that have the type of its values and no gradient.\n"
        "In a batch with a codec it is that of `payload_bytes` for the segments' gradients to be compressed to;\n"
        "`residual` is then the address of the tasklet's fp32 residual, if it has one, and elements in `padding`,\n"
        "ranges of (offset, numel) in ascending order, are never sent.")
        .def(
            "__init__",
            [](Tasklet* self, std::uint64_t index, std::uint64_t numel, std::uint64_t num_arrays,
               std::uint64_t extent_bytes, std::uint64_t read_file, std::uint64_t read_offset,
               std::uint64_t read_generation, std::uint64_t write_file, std::uint64_t write_offset,
               std::uint64_t write_generation, std::vector<Segment> segments, bool master_in_parameter,
               std::uint64_t offset, std::shared_ptr<const Blocks> blocks, Address payload, std::uint64_t payload_bytes,
               Address residual, std::vector<ElementRange> padding) {
                new (self) Tasklet{index,
                                   numel,
                                   num_arrays,
                                   extent_bytes,
                                   read_file,
                                   read_offset,
                                   read_generation,
                                   write_file,
                                   write_offset,
                                   write_generation,
                                   std::move(segments),
                                   master_in_parameter,
                                   offset,
                                   std::move(blocks),
                                   payload,
                                   payload_bytes,
                                   residual,
                                   std::move(padding)};
            },
            nb::kw_only(), "index"_a, "numel"_a, "num_arrays"_a, "extent_bytes"_a, "read_file"_a, "read_offset"_a,
            "read_generation"_a, "write_file"_a, "write_offset"_a, "write_generation"_a, "segments"_a,
            "master_in_parameter"_a = false, "offset"_a = 0, "blocks"_a = nb::none(), "payload"_a = 0,
            "payload_bytes"_a = 0, "residual"_a = 0, "padding"_a = std::vector<ElementRange>())
        .def_ro("index", &Tasklet::index)
        .def_ro("numel", &Tasklet::numel)
        .def_ro("num_arrays", &Tasklet::num_arrays)
        .def_ro("extent_bytes", &Tasklet::extent_bytes)
        .def_ro("read_file", &Tasklet::read_file)
        .def_ro("read_offset", &Tasklet::read_offset)
        .def_ro("read_generation", &Tasklet::read_generation)
        .def_ro("write_file", &Tasklet::write_file)
        .def_ro("write_offset", &Tasklet::write_offset)
        .def_ro("write_generation", &Tasklet::write_generation)
        .def_ro("segments", &Tasklet::segments)
        .def_ro("master_in_parameter", &Tasklet::master_in_parameter)
        .def_ro("offset", &Tasklet::offset)
        .def_prop_ro(
            "blocks", [](const Tasklet& self) { return std::const_pointer_cast<Blocks>(self.blocks); },
            nb::sig("def blocks(self) -> Blocks | None"))
        .def_ro("payload", &Tasklet::payload)
        .def_ro("payload_bytes", &Tasklet::payload_bytes)
        .def_ro("residual", &Tasklet::residual)
        .def_ro("padding", &Tasklet::padding)
        .def("in_file", &in_file, "file"_a, "The same tasklet for a pipeline that has its file at this index.")
        .def("compressed", &compressed, "payload_bytes"_a, "value_dtype"_a,
             "The same tasklet for a batch without a codec: its gradient has been compressed into its payload.");
}

void bind_whole_batch(nb::module_& m) {
    nb::class_<Batch>(m, "Batch",
                      "Tasklets to work in order. Validated by Pipeline.submit().\n\n"
                      "With a stream, parameters lie in its device's memory; they travel through it and\n"
                      "through one slot of host memory for each ring buffer.\n\n"
                      "With a codec (UPDATE only), every tasklet's gradient is compressed into its payload just\n"
                      "before it is updated by what the payload has. A tasklet may have an unscaled residual, what\n"
                      "earlier steps did not send: residual_scale times it is added to the gradient, which is scaled\n"
                      "by that, before. The batch leaves residuals as they are: feed_back() is for them.")
        .def(
            "__init__",
            [](Batch* self, Operation operation, std::vector<Tasklet> tasklets, std::vector<UpdateStep> steps,
               std::shared_ptr<const CudaStream> stream, std::shared_ptr<const GradientCodec> codec,
               float residual_scale) {
                new (self) Batch{operation,         std::move(tasklets), std::move(steps),
                                 std::move(stream), std::move(codec),    residual_scale};
            },
            "operation"_a, "tasklets"_a, "steps"_a = std::vector<UpdateStep>(), "stream"_a = nb::none(),
            "codec"_a = nb::none(), "residual_scale"_a = 1.0f)
        .def_ro("operation", &Batch::operation)
        .def_ro("tasklets", &Batch::tasklets)
        .def_ro("steps", &Batch::steps)
        .def_prop_ro(
            "stream", [](const Batch& self) { return std::const_pointer_cast<CudaStream>(self.stream); },
            nb::sig("def stream(self) -> CudaStream | None"))
        .def_prop_ro(
            "codec", [](const Batch& self) { return std::const_pointer_cast<GradientCodec>(self.codec); },
            nb::sig("def codec(self) -> GradientCodec | None"))
        .def_ro("residual_scale", &Batch::residual_scale);
}

}  // namespace

void bind_batch(nb::module_& m) {
    bind_segment(m);
    bind_operation(m);
    bind_blocks(m);
    bind_tasklet(m);
    bind_whole_batch(m);
}

}  // namespace smart_infinity
