#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "cuda_device.hpp"
#include "extent.hpp"

namespace smart_infinity {
namespace {

Identity make_identity(const nb::bytes& job, std::uint32_t rank, std::uint32_t state_format) {
    Identity identity{{}, rank, state_format};
    if (job.size() != kJobBytes) {
        throw std::invalid_argument("Identity: job has " + std::to_string(job.size()) + " bytes, it must have 16");
    }
    std::copy_n(static_cast<const std::uint8_t*>(job.data()), kJobBytes, identity.job.begin());
    return identity;
}

Segment make_segment(std::uint64_t offset, std::uint64_t numel, std::int64_t step, Address gradient,
                     DType gradient_dtype, Address parameter, DType parameter_dtype,
                     const std::vector<Address>& arrays) {
    if (arrays.size() > kMaxArrays) throw std::invalid_argument("Segment: more than 8 arrays");
    Segment segment{offset, numel, step, gradient, gradient_dtype, parameter, parameter_dtype, {}, arrays.size()};
    std::copy(arrays.begin(), arrays.end(), segment.arrays.begin());
    return segment;
}

nb::tuple arrays_of(const Segment& segment) {
    nb::list arrays;
    for (std::size_t index = 0; index < segment.num_arrays; ++index) arrays.append(segment.arrays[index]);
    return nb::tuple(arrays);
}

void bind_identity(nb::module_& m) {
    nb::class_<Identity>(m, "Identity",
                         "What the extents of a store carry.\n\nRaises:\n    ValueError: job is not 16 bytes.")
        .def(
            "__init__",
            [](Identity* self, const nb::bytes& job, std::uint32_t rank, std::uint32_t state_format) {
                new (self) Identity(make_identity(job, rank, state_format));
            },
            nb::kw_only(), "job"_a, "rank"_a, "state_format"_a)
        .def_prop_ro("job",
                     [](const Identity& self) {
                         return nb::bytes(reinterpret_cast<const char*>(self.job.data()), self.job.size());
                     })
        .def_ro("rank", &Identity::rank)
        .def_ro("state_format", &Identity::state_format);
}

void bind_adam_step(nb::module_& m) {
    nb::class_<AdamStep>(m, "AdamStep",
                         "The scalars of one hyperparameter set at one step, as fp32.\n\n"
                         "g = gradient * gradient_scale (+ l2 * p); m, v as in torch; p = p * decay\n"
                         "- step_size * (m / (sqrt(v) * inverse_sqrt_bias_correction2 + eps)).")
        .def(
            "__init__",
            [](AdamStep* self, float gradient_scale, float beta1, float one_minus_beta1, float beta2,
               float one_minus_beta2, float decay, float l2, float step_size, float inverse_sqrt_bias_correction2,
               float eps) {
                new (self) AdamStep{gradient_scale,
                                    beta1,
                                    one_minus_beta1,
                                    beta2,
                                    one_minus_beta2,
                                    decay,
                                    l2,
                                    step_size,
                                    inverse_sqrt_bias_correction2,
                                    eps};
            },
            nb::kw_only(), "gradient_scale"_a, "beta1"_a, "one_minus_beta1"_a, "beta2"_a, "one_minus_beta2"_a,
            "decay"_a, "l2"_a, "step_size"_a, "inverse_sqrt_bias_correction2"_a, "eps"_a)
        .def_ro("gradient_scale", &AdamStep::gradient_scale)
        .def_ro("beta1", &AdamStep::beta1)
        .def_ro("one_minus_beta1", &AdamStep::one_minus_beta1)
        .def_ro("beta2", &AdamStep::beta2)
        .def_ro("one_minus_beta2", &AdamStep::one_minus_beta2)
        .def_ro("decay", &AdamStep::decay)
        .def_ro("l2", &AdamStep::l2)
        .def_ro("step_size", &AdamStep::step_size)
        .def_ro("inverse_sqrt_bias_correction2", &AdamStep::inverse_sqrt_bias_correction2)
        .def_ro("eps", &AdamStep::eps);
}

void bind_segment(nb::module_& m) {
    nb::class_<Segment>(
        m, "Segment",
        "Elements [offset, offset + numel) of a tasklet; addresses are those of the first element, 0 is none.\n\n"
        "step -1 carries the state over and leaves the parameter alone. `arrays` are fp32: master, exp_avg,\n"
        "exp_avg_sq. WRITE and MODIFY take the master from `parameter` if arrays[0] is 0.")
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
        .value("UPDATE", Operation::kUpdate, "Read, optimizer update, parameters out, write the other slot.")
        .value("READ", Operation::kRead, "Read, copy arrays and the master (cast to the parameter) out.")
        .value("WRITE", Operation::kWrite, "Write arrays from memory; zeros where there is none.")
        .value("MODIFY", Operation::kModify, "Read, replace arrays from memory where there are some, write.");
}

void bind_tasklet(nb::module_& m) {
    nb::class_<Tasklet>(
        m, "Tasklet",
        "One extent. Segments are in ascending order and do not overlap; elements outside are carried over\n"
        "(WRITE: zeros). With master_in_parameter (UPDATE, fp32 parameters) the master is not read: it is\n"
        "the parameter, and segments cover the whole tasklet.")
        .def(
            "__init__",
            [](Tasklet* self, std::uint64_t index, std::uint64_t file, std::uint64_t numel, std::uint64_t num_arrays,
               std::uint64_t extent_bytes, std::uint64_t read_offset, std::uint64_t read_generation,
               std::uint64_t write_offset, std::uint64_t write_generation, std::vector<Segment> segments,
               bool master_in_parameter) {
                new (self) Tasklet{index,
                                   file,
                                   numel,
                                   num_arrays,
                                   extent_bytes,
                                   read_offset,
                                   read_generation,
                                   write_offset,
                                   write_generation,
                                   std::move(segments),
                                   master_in_parameter};
            },
            nb::kw_only(), "index"_a, "file"_a, "numel"_a, "num_arrays"_a, "extent_bytes"_a, "read_offset"_a,
            "read_generation"_a, "write_offset"_a, "write_generation"_a, "segments"_a, "master_in_parameter"_a = false)
        .def_ro("index", &Tasklet::index)
        .def_ro("file", &Tasklet::file)
        .def_ro("numel", &Tasklet::numel)
        .def_ro("num_arrays", &Tasklet::num_arrays)
        .def_ro("extent_bytes", &Tasklet::extent_bytes)
        .def_ro("read_offset", &Tasklet::read_offset)
        .def_ro("read_generation", &Tasklet::read_generation)
        .def_ro("write_offset", &Tasklet::write_offset)
        .def_ro("write_generation", &Tasklet::write_generation)
        .def_ro("segments", &Tasklet::segments)
        .def_ro("master_in_parameter", &Tasklet::master_in_parameter);
}

void bind_batch(nb::module_& m) {
    nb::class_<Batch>(m, "Batch",
                      "Tasklets to work in order. Validated by Pipeline.submit().\n\n"
                      "With a stream, parameters lie in its device's memory; they travel through it and\n"
                      "through one slot of host memory for each ring buffer.")
        .def(
            "__init__",
            [](Batch* self, Operation operation, std::vector<Tasklet> tasklets, std::vector<AdamStep> steps,
               std::shared_ptr<const CudaStream> stream) {
                new (self) Batch{operation, std::move(tasklets), std::move(steps), std::move(stream)};
            },
            "operation"_a, "tasklets"_a, "steps"_a = std::vector<AdamStep>(), "stream"_a = nb::none())
        .def_ro("operation", &Batch::operation)
        .def_ro("tasklets", &Batch::tasklets)
        .def_ro("steps", &Batch::steps);
}

}  // namespace

void bind_batches(nb::module_& m) {
    bind_identity(m);
    bind_adam_step(m);
    bind_segment(m);
    bind_operation(m);
    bind_tasklet(m);
    bind_batch(m);
}

}  // namespace smart_infinity
