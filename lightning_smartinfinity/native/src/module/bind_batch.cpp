// Binds batches and their parts.

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
#include <string>
#include <utility>
#include <vector>

#include "cuda/cuda_device.hpp"
#include "extent/batch.hpp"
#include "gradient/gradient_codec.hpp"
#include "module/module.hpp"
#include "tensor/gradient_memory.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

Segment make_segment(std::uint64_t offset, std::uint64_t numel, std::int64_t step, Address gradient,
                     DType gradient_dtype, Address parameter, DType parameter_dtype,
                     const std::vector<Address>& arrays) {
    if (arrays.size() > kMaxArrays) {
        throw std::invalid_argument("Segment: more than " + std::to_string(kMaxArrays) + " arrays");
    }
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

nb::tuple ready_of(const Batch& batch) {
    nb::list points;
    for (const auto& point : batch.ready) points.append(std::const_pointer_cast<ReadyPoint>(point));
    return nb::tuple(points);
}

void bind_segment(nb::module_& m) {
    nb::class_<Segment>(
        m, "Segment",
        "Elements [offset, offset + numel) of a tasklet. Addresses point to the first element; 0 means none.\n\n"
        "step -1 carries the state over and leaves the parameter unchanged. `arrays` are fp32: the master and\n"
        "the rule's state (exp_avg, exp_avg_sq; sum; momentum_buffer). WRITE and MODIFY take the master\n"
        "from `parameter` if arrays[0] is 0.")
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
    nb::enum_<Operation>(m, "Operation", "The operation of a batch on every tasklet.")
        .value("UPDATE", Operation::kUpdate, "Read, update, copy parameters out, write to the other place.")
        .value("READ", Operation::kRead, "Read, copy out arrays and the master (cast to the parameter's type).")
        .value("WRITE", Operation::kWrite, "Write arrays from memory; zeros where no array is given.")
        .value("MODIFY", Operation::kModify, "Read, replace the arrays that are given in memory, write.");
}

void bind_blocks(nb::module_& m) {
    nb::class_<Blocks>(
        m, "Blocks",
        "The blocks into which 8-bit formats divide a tasklet's elements: at every multiple of 256 and at\n"
        "`borders`, elements that begin a parameter.")
        .def(nb::init<std::vector<std::uint64_t>>(), "borders"_a)
        .def("count", &Blocks::count, "numel"_a, "Return the number of blocks of a tasklet of this many elements.");
}

void bind_tasklet(nb::module_& m) {
    nb::class_<Tasklet>(
        m, "Tasklet",
        "One extent, read from one place and written to another, in the same file or in two.\n\n"
        "Segments are in ascending order and do not overlap; elements outside them are carried over (WRITE:\n"
        "zeros). With master_in_parameter (UPDATE; parameters of the format's parameter_dtype) the first\n"
        "region is not read: it is the parameter, and segments cover the whole tasklet. `offset` is the first\n"
        "element's offset in the partition, a multiple of 256: stochastic rounding depends on it. `blocks` has\n"
        "the borders of parameters, for formats that have blocks. `payload` is the address of a compressed gradient;\n"
        "segments then have the type of its values and no gradient.\n\n"
        "In a batch with a codec, `payload` is the address of `payload_bytes` of memory into which the segments'\n"
        "gradients are compressed, `residual` the address of the tasklet's fp32 residual, if it has one, and\n"
        "elements in `padding`, ranges of (offset, numel) in ascending order, are never sent.\n\n"
        "`gradient` is the window that holds the segments' gradients, if they are not always in memory.")
        .def(
            "__init__",
            [](Tasklet* self, std::uint64_t index, std::uint64_t numel, std::uint64_t num_arrays,
               std::uint64_t extent_bytes, std::uint64_t read_file, std::uint64_t read_offset,
               std::uint64_t read_generation, std::uint64_t write_file, std::uint64_t write_offset,
               std::uint64_t write_generation, std::vector<Segment> segments, bool master_in_parameter,
               std::uint64_t offset, std::shared_ptr<const Blocks> blocks, Address payload, std::uint64_t payload_bytes,
               Address residual, std::vector<ElementRange> padding, std::shared_ptr<GradientWindow> gradient) {
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
                                   std::move(padding),
                                   std::move(gradient)};
            },
            nb::kw_only(), "index"_a, "numel"_a, "num_arrays"_a, "extent_bytes"_a, "read_file"_a, "read_offset"_a,
            "read_generation"_a, "write_file"_a, "write_offset"_a, "write_generation"_a, "segments"_a,
            "master_in_parameter"_a = false, "offset"_a = 0, "blocks"_a = nb::none(), "payload"_a = 0,
            "payload_bytes"_a = 0, "residual"_a = 0, "padding"_a = std::vector<ElementRange>(),
            "gradient"_a = nb::none())
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
        .def_prop_ro(
            "gradient", [](const Tasklet& self) { return self.gradient; },
            nb::sig("def gradient(self) -> GradientWindow | None"))
        .def("in_file", &in_file, "file"_a, "Return the same tasklet for a pipeline that has its file at this index.")
        .def(
            "compressed", &compressed, "payload_bytes"_a, "value_dtype"_a,
            "Return the same tasklet for a batch without a codec, after its gradient was compressed into its payload.");
}

void bind_whole_batch(nb::module_& m) {
    nb::class_<Batch>(m, "Batch",
                      "Tasklets to process in order. Pipeline.submit() validates them.\n\n"
                      "With a stream, parameters are in its device's memory. They are copied by the stream, through\n"
                      "one slot of host memory for each ring buffer.\n\n"
                      "With a codec (UPDATE only), every tasklet's gradient is compressed into its payload just\n"
                      "before the update, which uses the payload. A tasklet may have an unscaled residual, the part\n"
                      "that earlier steps did not send: residual_scale times the residual is first added to the\n"
                      "gradient, which has that scale. The batch does not change residuals; feed_back() does.\n\n"
                      "io_class is the priority of tasklets that were not preferred; preferred ones are GATHER.\n\n"
                      "No tasklet is computed before the points in `ready` are reached. slot_bytes are the\n"
                      "parameter bytes of the largest tasklet that may be added to a batch with a stream.\n\n"
                      "With writes_back, resident tasklets are changed in memory only. A MODIFY without segments and\n"
                      "without writes_back writes them to storage as they are.")
        .def(
            "__init__",
            [](Batch* self, Operation operation, std::vector<Tasklet> tasklets, std::vector<UpdateStep> steps,
               std::shared_ptr<const CudaStream> stream, std::shared_ptr<const GradientCodec> codec,
               float residual_scale, IoClass io_class, std::vector<std::shared_ptr<const ReadyPoint>> ready,
               std::uint64_t slot_bytes, bool writes_back) {
                new (self) Batch{operation,        std::move(tasklets), std::move(steps), std::move(stream),
                                 std::move(codec), residual_scale,      io_class,         std::move(ready),
                                 slot_bytes,       writes_back};
            },
            "operation"_a, "tasklets"_a, "steps"_a = std::vector<UpdateStep>(), "stream"_a = nb::none(),
            "codec"_a = nb::none(), "residual_scale"_a = 1.0f, "io_class"_a = IoClass::kState,
            "ready"_a = std::vector<std::shared_ptr<const ReadyPoint>>(), "slot_bytes"_a = 0, "writes_back"_a = false)
        .def_ro("operation", &Batch::operation)
        .def_ro("tasklets", &Batch::tasklets)
        .def_ro("steps", &Batch::steps)
        .def_prop_ro(
            "stream", [](const Batch& self) { return std::const_pointer_cast<CudaStream>(self.stream); },
            nb::sig("def stream(self) -> CudaStream | None"))
        .def_prop_ro(
            "codec", [](const Batch& self) { return std::const_pointer_cast<GradientCodec>(self.codec); },
            nb::sig("def codec(self) -> GradientCodec | None"))
        .def_ro("residual_scale", &Batch::residual_scale)
        .def_ro("io_class", &Batch::io_class)
        .def_prop_ro("ready", &ready_of, nb::sig("def ready(self) -> tuple[ReadyPoint, ...]"))
        .def_ro("slot_bytes", &Batch::slot_bytes)
        .def_ro("writes_back", &Batch::writes_back);
}

}  // namespace

void bind_batch(nb::module_& m) {
    m.attr("MAX_ARRAYS") = kMaxArrays;
    bind_segment(m);
    bind_operation(m);
    bind_blocks(m);
    bind_tasklet(m);
    bind_whole_batch(m);
}

}  // namespace smart_infinity
