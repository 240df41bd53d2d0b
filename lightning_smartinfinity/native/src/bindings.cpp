// The Python module: bindings only.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings_card.hpp"
#include "bindings_gradients.hpp"
#include "crc32c.hpp"
#include "cuda_device.hpp"
#include "fault_injection.hpp"
#include "file_queue.hpp"
#include "gradient_codec.hpp"
#include "instruction_set.hpp"
#include "io_engines.hpp"
#include "pipeline.hpp"
#include "system_error.hpp"
#include "throttle.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

using WithoutGil = nb::call_guard<nb::gil_scoped_release>;

void raise_os_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const SystemError& error) {
        const nb::object path = error.path().empty() ? nb::none() : nb::object(nb::str(error.path().c_str()));
        const nb::tuple arguments = nb::make_tuple(error.code().value(), error.what(), path);
        PyErr_SetObject(PyExc_OSError, arguments.ptr());
    } catch (const std::system_error& error) {  // a thread that could not be started
        PyErr_SetObject(PyExc_OSError, nb::make_tuple(error.code().value(), error.what()).ptr());
    }
}

// Becomes the package's error, which says what to do about it.
void raise_cuda_error(const std::exception_ptr& pointer, void*) {
    try {
        std::rethrow_exception(pointer);
    } catch (const CudaError& error) {
        const nb::object type = nb::module_::import_("lightning_smartinfinity.errors").attr("CudaError");
        const nb::object remedy = type.attr("REMEDY");
        PyErr_SetObject(type.ptr(), nb::make_tuple(error.what(), remedy).ptr());
    }
}

// Buffer protocol: a memoryview holds a reference, and with it the mapping.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const HostBuffer* const buffer = nb::inst_ptr<HostBuffer>(self);
    return PyBuffer_FillInfo(view, self, buffer->data(), static_cast<Py_ssize_t>(buffer->bytes()), 0, flags);
}

PyType_Slot host_buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

// Destruction waits for what is in flight, which must not hold up other Python threads.
class PythonPipeline : public Pipeline {
 public:
    using Pipeline::Pipeline;
    ~PythonPipeline() {
        const nb::gil_scoped_release release;
        close();
    }
};

class PythonFileQueue : public FileQueue {
 public:
    using FileQueue::FileQueue;
    ~PythonFileQueue() {
        const nb::gil_scoped_release release;
        close();
    }
};

// Lets Ctrl-C end a wait. Python runs signal handlers in the main thread only; elsewhere this does nothing.
void check_signals() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

const void* pointer_to(Address address) { return reinterpret_cast<const void*>(address); }

std::vector<double> accumulate(const std::vector<Address>& gradients, const std::vector<Address>& sums,
                               const std::vector<std::size_t>& numels, const std::vector<bool>& adds,
                               DType gradient_dtype, DType dtype) {
    const std::size_t count = gradients.size();
    if (sums.size() != count || numels.size() != count || adds.size() != count) {
        throw std::invalid_argument("accumulate() needs as many of one as of the other");
    }
    const auto add = kernels().accumulate[static_cast<std::size_t>(gradient_dtype)][static_cast<std::size_t>(dtype)];
    std::vector<double> squares(count);
    for (std::size_t i = 0; i < count; ++i) {
        squares[i] = add(pointer_to(gradients[i]), reinterpret_cast<void*>(sums[i]), numels[i], adds[i]);
    }
    return squares;
}

void bind_kernels(nb::module_& m) {
    nb::enum_<DType>(m, "DType", "Type of gradients and parameters in memory.")
        .value("FLOAT32", DType::kFloat32)
        .value("FLOAT16", DType::kFloat16)
        .value("BFLOAT16", DType::kBFloat16);
    nb::enum_<InstructionSet>(m, "InstructionSet", "What the kernels were compiled for; all give the same bits.")
        .value("SCALAR", InstructionSet::kScalar)
        .value("AVX2", InstructionSet::kAvx2)
        .value("AVX512", InstructionSet::kAvx512);
    m.def("supported_instruction_sets", &supported_instruction_sets, "Of this CPU, slowest first.");
    m.def(
        "select_instruction_set",
        [](std::optional<InstructionSet> choice) {
            select_instruction_set(choice.value_or(supported_instruction_sets().back()));
            return selected_instruction_set();
        },
        "choice"_a.none(),
        "Use one from now on, in every thread; None is the best. Returns it.\n\n"
        "Raises:\n    ValueError: This CPU does not support it.");
    m.def(
        "crc32c",
        [](Address address, std::size_t nbytes, std::uint32_t value, std::optional<int> width) {
            const void* const data = pointer_to(address);
            return width ? crc32c_by(*width, data, nbytes, value) : crc32c(data, nbytes, value);
        },
        "address"_a, "nbytes"_a, "value"_a = 0, "width"_a = nb::none(), WithoutGil(),
        "CRC-32C of memory, continuing `value`: in the way of the instruction set in use, or of a width in "
        "crc32c_widths().\n\n"
        "Raises:\n    ValueError: This CPU has no such way.");
    m.def("crc32c_combine", &crc32c_combine, "first"_a, "second"_a, "nbytes"_a,
          "CRC-32C of two pieces of memory, one behind the other, from the checksum of each; nbytes are the second's.");
    m.def("crc32c_widths", &crc32c_widths,
          "Ways to compute CRC-32C on this CPU, slowest first: the bits of their registers, 0 for the table.");
    m.def(
        "sum_of_squares",
        [](Address address, std::size_t numel, DType dtype) {
            return kernels().sum_of_squares[static_cast<std::size_t>(dtype)](pointer_to(address), numel);
        },
        "address"_a, "numel"_a, "dtype"_a, WithoutGil(),
        "In double precision and a fixed order: the same bits on every instruction set. Finite iff every element is.");
    m.def("accumulate", &accumulate, "gradients"_a, "sums"_a, "numels"_a, "adds"_a, "gradient_dtype"_a, "dtype"_a,
          WithoutGil(),
          "Gradients become sums, or are added to them, as torch rounds; all in one pass over memory.\n\n"
          "Args:\n"
          "    gradients: Addresses.\n"
          "    sums: Addresses; none overlaps its gradient.\n"
          "    numels: Elements of each.\n"
          "    adds: Whether each is added.\n"
          "    gradient_dtype: Of the gradients.\n"
          "    dtype: Of the sums.\n\n"
          "Returns:\n    What sum_of_squares() gives for each sum.\n\n"
          "Raises:\n    ValueError: The lists differ in length.");
}

void bind_host_buffer(nb::module_& m) {
    nb::class_<HostBuffer>(
        m, "HostBuffer", nb::type_slots(host_buffer_slots),
        "Zero-filled, page-aligned memory (2 MiB-aligned from that size on), absent from forked children.\n\n"
        "Raises:\n    ValueError: No bytes.\n    OSError: The memory cannot be mapped.")
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def_prop_ro("address", [](const HostBuffer& self) { return reinterpret_cast<Address>(self.data()); })
        .def_prop_ro("nbytes", &HostBuffer::bytes)
        .def("register", &HostBuffer::try_register, "device"_a, WithoutGil(),
             "Let copies from and to the device be asynchronous, until unregister() or the end of the memory.\n\n"
             "Returns whether it worked; if not, the device's registration_failure says why.")
        .def("unregister", &HostBuffer::unregister, WithoutGil(), "Idempotent.")
        .def(
            "memoryview",
            [](nb::handle self) {
                PyObject* const view = PyMemoryView_FromObject(self.ptr());
                if (view == nullptr) throw nb::python_error();
                return nb::steal(view);
            },
            nb::sig("def memoryview(self) -> builtins.memoryview"), "Writable bytes; they keep the buffer alive.");
}

CudaStreamHandle stream_of(Address handle) { return reinterpret_cast<CudaStreamHandle>(handle); }

void bind_cuda_device(nb::module_& m) {
    nb::class_<CudaDevice>(
        m, "CudaDevice",
        "A CUDA device through its primary context and the driver's library, opened at run time.\n\n"
        "Copies run in a stream's order; their memory stays until they have completed. Streams are\n"
        "handles as torch's `cuda_stream`, 0 is the default stream. Not usable in a forked child.\n\n"
        "Raises:\n    CudaError: No driver, no such device, or any call that fails.")
        .def(nb::init<int>(), "index"_a)
        .def_prop_ro("index", &CudaDevice::index)
        .def_prop_ro("registration_failure", &CudaDevice::registration_failure,
                     "Why host memory could not be registered; empty if it always could.")
        .def(
            "copy_to_host",
            [](const CudaDevice& self, Address host, Address device, std::size_t nbytes, Address stream) {
                self.copy_to_host(reinterpret_cast<void*>(host), device, nbytes, stream_of(stream));
            },
            nb::kw_only(), "host"_a, "device"_a, "nbytes"_a, "stream"_a, WithoutGil(), "Start a copy.")
        .def(
            "copy_to_device",
            [](const CudaDevice& self, Address device, Address host, std::size_t nbytes, Address stream) {
                self.copy_to_device(device, pointer_to(host), nbytes, stream_of(stream));
            },
            nb::kw_only(), "device"_a, "host"_a, "nbytes"_a, "stream"_a, WithoutGil(), "Start a copy.");
}

void bind_cuda_event(nb::module_& m) {
    nb::class_<CudaEvent>(m, "CudaEvent",
                          "A point in a stream's order; recorded again, it is another one.\n\n"
                          "Raises:\n    CudaError: A call failed, or the work before the point did.")
        .def(nb::init<std::shared_ptr<const CudaDevice>>(), "device"_a)
        .def(
            "record", [](const CudaEvent& self, Address stream) { self.record(stream_of(stream)); }, "stream"_a,
            WithoutGil(), "Make it the point that the stream has reached with what it was given so far.")
        .def("synchronize", &CudaEvent::synchronize, WithoutGil(), "Until the work before the point is done.")
        .def(
            "hold", [](const CudaEvent& self, Address stream) { self.hold(stream_of(stream)); }, "stream"_a,
            WithoutGil(), "Let what the stream is given from now on run after the point.");
}

void bind_cuda_stream(nb::module_& m) {
    nb::class_<CudaStream>(m, "CudaStream",
                           "A stream of our own, without implicit order with any other.\n\n"
                           "Raises:\n    CudaError: A call failed.")
        .def(nb::init<std::shared_ptr<const CudaDevice>>(), "device"_a)
        .def_prop_ro("handle", [](const CudaStream& self) { return reinterpret_cast<Address>(self.handle()); })
        .def(
            "follow", [](const CudaStream& self, Address other) { self.follow(stream_of(other)); }, "other"_a,
            WithoutGil(), "Let what is given to this stream from now on run after what is in the other one now.")
        .def(
            "lead", [](const CudaStream& self, Address other) { self.lead(stream_of(other)); }, "other"_a, WithoutGil(),
            "Let what is given to the other stream from now on run after what is in this one now.");
}

void bind_state_file(nb::module_& m) {
    nb::class_<StateFile>(m, "StateFile",
                          "One open descriptor of an existing file, close-on-exec.\n\n"
                          "A pipeline that uses it keeps the descriptor open until it is closed too.\n\n"
                          "Raises:\n    OSError: With errno and filename.")
        .def(
            "__init__",
            [](StateFile* self, std::string path, bool direct) {
                new (self) StateFile(std::move(path), direct ? Access::kDirect : Access::kBuffered);
            },
            "path"_a, nb::kw_only(), "direct"_a)
        .def_prop_ro("path", &StateFile::path)
        .def_prop_ro("direct", [](const StateFile& self) { return self.access() == Access::kDirect; })
        .def(
            "sync",
            [](const StateFile& self) {
                const StateFile file = self;  // another thread may close it meanwhile
                const nb::gil_scoped_release release;
                file.sync();
            },
            "fdatasync; raises OSError.")
        .def("close", &StateFile::close, "Idempotent.");
}

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
        "(WRITE: zeros). With master_in_parameter (UPDATE, fp32 parameters; INT8_REMAINDER: bf16) the master\n"
        "is not read, or only its remainder: it is the parameter, and segments cover the whole tasklet.\n"
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
        .def_ro("payload", &Tasklet::payload)
        .def_ro("payload_bytes", &Tasklet::payload_bytes)
        .def_ro("residual", &Tasklet::residual)
        .def_ro("padding", &Tasklet::padding);
}

void bind_batch(nb::module_& m) {
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
        .def_ro("residual_scale", &Batch::residual_scale);
}

std::optional<IoEngineKind> io_engine_of(const std::string& name) {
    if (name == "auto") return std::nullopt;
    return io_engine_named(name);
}

void bind_io_engines(nb::module_& m) {
    m.def(
        "io_engines",
        [] {
            std::vector<std::tuple<std::string, std::optional<std::string>>> engines;
            for (const IoEngineKind kind : kIoEngineKinds) engines.emplace_back(name_of(kind), unavailable(kind));
            return engines;
        },
        "The I/O engines by name, fastest first, each with the reason why it is not to be had here, or None.");
}

const char* name_of(Work work) {
    switch (work) {
        case Work::kRead:
            return "read";
        case Work::kFetch:
            return "fetch";
        case Work::kCompute:
            return "compute";
        case Work::kWrite:
            return "write";
        case Work::kDeliver:
            break;
    }
    return "deliver";
}

Work work_named(const std::string& name) {
    for (const Work work : {Work::kRead, Work::kFetch, Work::kCompute, Work::kWrite, Work::kDeliver}) {
        if (name == name_of(work)) return work;
    }
    throw std::invalid_argument("TransferSchedule: unknown action " + name);
}

void bind_schedule(nb::module_& m) {
    using NamedAction = std::tuple<std::string, std::size_t, std::size_t>;
    nb::class_<TransferSchedule>(m, "TransferSchedule",
                                 "The order of a batch as a pure state machine: no I/O, no clock, no threads.")
        .def(
            "__init__",
            [](TransferSchedule* self, std::size_t num_tasklets, std::size_t num_buffers, bool reads, bool writes,
               bool fetches, bool delivers) {
                new (self) TransferSchedule(num_tasklets, num_buffers, {reads, writes, fetches, delivers});
            },
            "num_tasklets"_a, "num_buffers"_a, nb::kw_only(), "reads"_a, "writes"_a, "fetches"_a = false,
            "delivers"_a = false)
        .def(
            "next",
            [](TransferSchedule& self) {
                std::vector<NamedAction> actions;
                while (const auto action = self.next()) {
                    actions.emplace_back(name_of(action->work), action->tasklet, action->buffer);
                }
                return actions;
            },
            "Actions to start now, in this order: (name, tasklet, buffer); names are \"read\", \"fetch\" (parameters\n"
            "from a device), \"compute\", \"write\" and \"deliver\" (parameters to a device).")
        .def("extend", nb::overload_cast<std::size_t>(&TransferSchedule::extend), "num_tasklets"_a,
             "More tasklets, behind those there are.")
        .def(
            "extend_resident",
            [](TransferSchedule& self, std::size_t num_tasklets, bool reads, bool writes) {
                self.extend(std::vector<TransferSchedule::Way>(num_tasklets, {reads, writes, true}));
            },
            "num_tasklets"_a, nb::kw_only(), "reads"_a, "writes"_a,
            "The same for resident tasklets; their buffers are numbered from `num_buffers` on.")
        .def("prefer", &TransferSchedule::prefer, "tasklets"_a,
             "Of these tasklets those that have not begun are begun next, in this order.")
        .def(
            "done",
            [](TransferSchedule& self, const std::string& action, std::size_t tasklet) {
                self.done(work_named(action), tasklet);
            },
            "action"_a, "tasklet"_a, "A started action has ended.\n\nRaises:\n    ValueError: It is not in flight.")
        .def(
            "fail",
            [](TransferSchedule& self, const std::string& action, std::size_t tasklet) {
                self.fail(work_named(action), tasklet);
            },
            "action"_a, "tasklet"_a,
            "A started action has ended without success: nothing new starts but deliveries, which compute has\n"
            "begun; others still report done.")
        .def("parameters_out", &TransferSchedule::parameters_out, "tasklet"_a, "Whether it has been computed.")
        .def("complete", &TransferSchedule::complete, "By tasklet: whether all of it has ended with success.")
        .def_prop_ro("finished", &TransferSchedule::finished);
}

void bind_results(nb::module_& m) {
    nb::class_<FileCounters>(m, "FileCounters", "Of one file, since creation.")
        .def_ro("read_bytes", &FileCounters::read_bytes)
        .def_ro("written_bytes", &FileCounters::written_bytes)
        .def_ro("busy_seconds", &FileCounters::busy_seconds, "With at least one request in the system.");
    nb::class_<Counters>(m, "Counters", "Since creation. Seconds are summed over threads.")
        .def_ro("read_bytes", &Counters::read_bytes)
        .def_ro("written_bytes", &Counters::written_bytes)
        .def_ro("read_calls", &Counters::read_calls)
        .def_ro("write_calls", &Counters::write_calls)
        .def_ro("cached_read_bytes", &Counters::cached_read_bytes, "Of resident tasklets: not read.")
        .def_ro("cached_write_bytes", &Counters::cached_write_bytes, "Of resident tasklets: not written.")
        .def_ro("shared_read_bytes", &Counters::shared_read_bytes, "Of a card: from it to the host.")
        .def_ro("shared_write_bytes", &Counters::shared_write_bytes, "Of a card: from the host to it.")
        .def_ro("internal_read_bytes", &Counters::internal_read_bytes, "Of a card: from storage to it.")
        .def_ro("internal_write_bytes", &Counters::internal_write_bytes, "Of a card: from it to storage.")
        .def_ro("padding_bytes", &Counters::padding_bytes, "Of a card: what these four do not count, of blocks.")
        .def_ro("control_bytes", &Counters::control_bytes, "Of a card: trailers and status beats.")
        .def_ro("gradient_file_bytes", &Counters::gradient_file_bytes,
                "Of a card: blocks that were written to the file of gradients, and read from it.")
        .def_ro("read_seconds", &Counters::read_seconds)
        .def_ro("write_seconds", &Counters::write_seconds)
        .def_ro("compute_seconds", &Counters::compute_seconds)
        .def_ro("wait_seconds", &Counters::wait_seconds)
        .def_ro("system_calls", &Counters::system_calls, "Of the I/O engine.")
        .def_ro("io_cpu_seconds", &Counters::io_cpu_seconds, "Of its threads.")
        .def_ro("registered_bytes", &Counters::registered_bytes, "Of memory that is pinned for it now.")
        .def_ro("registration_errno", &Counters::registration_errno, "Why none is, where it asked for it, or 0.")
        .def_ro("files", &Counters::files, "Of a pipeline, by index.");
    nb::class_<Failure>(
        m, "Failure",
        "Why a batch stopped: kind is io, short, checksum, foreign, generation, format, cuda, device (a card) or\n"
        "gradient (a compressed one); errno may be 0.")
        .def_prop_ro("kind", [](const Failure& self) { return std::string(smart_infinity::name_of(self.kind)); })
        .def_ro("path", &Failure::path)
        .def_ro("offset", &Failure::offset)
        .def_ro("errno", &Failure::error)
        .def_ro("tasklet", &Failure::tasklet)
        .def_ro("message", &Failure::message)
        .def("__repr__", [](const Failure& self) {
            return std::string("Failure(") + smart_infinity::name_of(self.kind) + ": " + self.message + ")";
        });
}

void bind_pipeline(nb::module_& m) {
    nb::class_<PythonPipeline>(
        m, "Pipeline",
        "Works batches of tasklets in a ring of buffers: reads, compute and writes overlap.\n\n"
        "The first failure stops new work; wait() returns it from then on, drain() returns it and ends the\n"
        "batch. Not usable in a forked child.\n\n"
        "io_engine is one of io_engines(), or \"auto\": the fastest that works here for these files.\n\n"
        "The tasklets with the indices 0, 1, ... are resident, as many as resident_bytes has items, the sizes of\n"
        "their extents: their state stays in host memory. Unless resident_through, it is never on storage.\n\n"
        "With a card, it works the batches, in a ring of its own memory, and I/O runs in threads. More than one\n"
        "compute thread lets the gradient of a tasklet travel while another is updated.\n\n"
        "Raises:\n    ValueError: A size or number is out of range.\n"
        "    OSError: Memory, threads or the I/O engine are not to be had.\n"
        "    CardError: The card fails, or has too little memory.")
        .def(
            "__init__",
            [](PythonPipeline* self, std::vector<StateFile> files, const Identity& identity, std::size_t num_buffers,
               std::size_t buffer_bytes, std::size_t io_threads, std::size_t compute_threads,
               const std::string& io_engine, std::vector<std::size_t> resident_bytes, bool resident_through,
               std::optional<CardOptions> card) {
                const nb::gil_scoped_release release;  // a card may answer with Python's lock only
                new (self) PythonPipeline(PipelineOptions{std::move(files),
                                                          identity,
                                                          num_buffers,
                                                          buffer_bytes,
                                                          io_threads,
                                                          compute_threads,
                                                          io_engine_of(io_engine),
                                                          {std::move(resident_bytes), resident_through},
                                                          std::move(card)});
            },
            nb::kw_only(), "files"_a, "identity"_a, "num_buffers"_a, "buffer_bytes"_a, "io_threads"_a = 4,
            "compute_threads"_a = 1, "io_engine"_a = "auto", "resident_bytes"_a = std::vector<std::size_t>(),
            "resident_through"_a = true, "card"_a = nb::none())
        .def_prop_ro(
            "io_engine", [](const PythonPipeline& self) { return name_of(self.io_engine()); },
            "The engine in use: one of io_engines().")
        .def_prop_ro("ring_bytes", &PythonPipeline::ring_bytes)
        .def_prop_ro("cache_bytes", &PythonPipeline::cache_bytes, "Of resident tasklets.")
        .def("submit", &PythonPipeline::submit, "batch"_a, WithoutGil(),
             "Start a batch; returns at once. Memory it names must stay until drain().\n\n"
             "Raises:\n    ValueError: The batch cannot be worked, or another one is active.")
        .def("extend", &PythonPipeline::extend, "more"_a, WithoutGil(),
             "Add tasklets behind those of the active batch; returns at once. They are counted on from its last.\n\n"
             "Raises:\n    ValueError: They cannot be worked, are of another operation or on a CUDA device, or no "
             "batch\n"
             "        is active.")
        .def("prefer", &PythonPipeline::prefer, "positions"_a, WithoutGil(),
             "Of these tasklets of the active batch those that have not begun are begun next, in this order.")
        .def(
            "wait",
            [](PythonPipeline& self, std::size_t first, std::optional<std::size_t> last) {
                return self.wait(first, last, check_signals);
            },
            "first"_a = 0, "last"_a = nb::none(), WithoutGil(),
            "Until batch tasklets [first, last) have their parameters and arrays out, or the batch failed.\n\n"
            "A signal handler that raises, as that of Ctrl-C, ends the wait; the batch goes on.")
        .def(
            "wait_for",
            [](PythonPipeline& self, const std::vector<std::size_t>& positions) {
                return self.wait_for(positions, check_signals);
            },
            "positions"_a, WithoutGil(),
            "As wait(), for tasklets anywhere in the batch, as counted in it; those that have not begun are preferred.")
        .def(
            "drain", [](PythonPipeline& self) { return self.drain(check_signals); }, WithoutGil(),
            "Until nothing is in flight; the batch is over. A signal handler may end the wait, as in wait().")
        .def("abandon", &PythonPipeline::abandon, WithoutGil(),
             "End the batch, whose waiters get a failure, once nothing is in flight: what has not begun is not done.")
        .def("finished", &PythonPipeline::complete, WithoutGil(),
             "Positions in the active batch, or the last, of tasklets that are wholly done: their outputs in memory,\n"
             "their extents written.")
        .def_prop_ro("busy", &PythonPipeline::busy, WithoutGil(),
                     "Whether a card's run that timed out has not returned; no batch may be submitted until then.")
        .def("counters", &PythonPipeline::counters)
        .def("close", &PythonPipeline::close, WithoutGil(),
             "Abandon the batch, whose waiters get a failure; wait for what is in flight. Idempotent.");
}

FileQueue::Ticket submit(FileQueue& queue, Direction direction, const StateFile& file, std::uint64_t offset,
                         Address address, std::size_t nbytes) {
    const StateFile held = file;  // another thread may close it meanwhile
    const nb::gil_scoped_release release;
    return queue.submit(direction, held, offset, reinterpret_cast<std::byte*>(address), nbytes);
}

// The kernel registers at most a GiB in one piece.
MemoryRange registered_range(const HostBuffer& memory) {
    return {memory.data(), memory.bytes(), std::min(memory.bytes(), std::size_t{1} << 30)};
}

void bind_file_queue(nb::module_& m) {
    nb::class_<PythonFileQueue>(
        m, "FileQueue",
        "Reads and writes files in the background; large requests run in parts, side by side.\n\n"
        "`memory` is what most requests will name: an engine that gains by it registers it once.\n"
        "A direct file wants offset, address and nbytes to be multiples of 4096. Not usable in a forked child.\n\n"
        "Raises:\n    ValueError: A number is out of range.\n"
        "    OSError: Threads or the I/O engine are not to be had.")
        .def(
            "__init__",
            [](PythonFileQueue* self, std::size_t io_threads, const std::string& io_engine, const HostBuffer* memory) {
                const MemoryRange range = memory ? registered_range(*memory) : MemoryRange{};
                new (self) PythonFileQueue(io_threads, io_engine_of(io_engine), range);
            },
            nb::kw_only(), "io_threads"_a = 4, "io_engine"_a = "auto", "memory"_a = nb::none(), nb::keep_alive<1, 4>())
        .def(
            "read",
            [](PythonFileQueue& self, const StateFile& file, std::uint64_t offset, Address address,
               std::size_t nbytes) { return submit(self, Direction::kRead, file, offset, address, nbytes); },
            "file"_a, nb::kw_only(), "offset"_a, "address"_a, "nbytes"_a,
            "Start reading; returns a ticket. The memory must stay until wait().\n\n"
            "Raises:\n    ValueError: It cannot be transferred.")
        .def(
            "write",
            [](PythonFileQueue& self, const StateFile& file, std::uint64_t offset, Address address,
               std::size_t nbytes) { return submit(self, Direction::kWrite, file, offset, address, nbytes); },
            "file"_a, nb::kw_only(), "offset"_a, "address"_a, "nbytes"_a,
            "Start writing; returns a ticket. The memory must stay, unchanged, until wait().\n\n"
            "Raises:\n    ValueError: It cannot be transferred.")
        .def(
            "wait", [](PythonFileQueue& self, FileQueue::Ticket ticket) { return self.wait(ticket, check_signals); },
            "ticket"_a, WithoutGil(),
            "Until the request has ended, all of it or with a failure, which only the first wait returns.\n\n"
            "A signal handler that raises, as that of Ctrl-C, ends the wait; the request goes on, its ticket stays\n"
            "open and its memory in use.\n\n"
            "Raises:\n    ValueError: There is no such ticket.")
        .def_prop_ro(
            "io_engine", [](const PythonFileQueue& self) { return name_of(self.io_engine()); },
            "The engine in use: one of io_engines().")
        .def("counters", &PythonFileQueue::counters)
        .def("close", &PythonFileQueue::close, WithoutGil(), "Wait for what is in flight. Idempotent.");
}

template <class Worker>
void bind_inject(nb::module_& m, const char* name) {
    m.def(
        "inject",
        [](Worker& worker, std::uint64_t seed, std::int64_t max_delay_us, std::int64_t fail_read_at,
           std::int64_t fail_write_at, std::int64_t short_transfer_every, int error) {
            const Faults faults{seed, max_delay_us, fail_read_at, fail_write_at, short_transfer_every, error};
            worker.decorate_engine([&faults](std::unique_ptr<IoEngine> engine) {
                return std::make_unique<FaultInjectingEngine>(std::move(engine), faults);
            });
        },
        nb::arg(name), nb::kw_only(), "seed"_a = 0, "max_delay_us"_a = 0, "fail_read_at"_a = -1, "fail_write_at"_a = -1,
        "short_transfer_every"_a = 0, "errno"_a = EIO, WithoutGil(),
        "Faults for tests, from now on: requests are counted from 0, reads and writes apart.");
}

void bind_throttle(nb::module_& m) {
    nb::class_<Throttle>(m, "Throttle", "Makes one file of a pipeline slow, for tests: its requests take turns.")
        .def(nb::new_([](PythonPipeline& pipeline, const StateFile& file) {
                 const auto throttle = std::make_shared<Throttle>(file.descriptor());
                 pipeline.decorate_engine([&throttle](std::unique_ptr<IoEngine> engine) {
                     return std::make_unique<ThrottledEngine>(std::move(engine), throttle);
                 });
                 return throttle;
             }),
             "pipeline"_a, "file"_a)
        .def_prop_rw(
            "bytes_per_second", [](const Throttle& self) { return self.bytes_per_second.load(); },
            [](Throttle& self, double rate) { self.bytes_per_second = rate; }, "0: as fast as it is.");
}

void bind_use_cuda_library(nb::module_& m) {
    m.def("use_cuda_library", &use_cuda_library, "path"_a.none(),
          "Open this library instead of libcuda.so.1 from now on; None: libcuda.so.1. What exists keeps its own.");
}

}  // namespace
}  // namespace smart_infinity

NB_MODULE(_core, m) {
    using namespace smart_infinity;
    m.doc() = "The native core: I/O, update kernels, checksums and the transfer schedule.";
    // At interpreter exit a traceback or a module may still hold objects: no news for a user.
    nb::set_leak_warnings(false);
    nb::register_exception_translator(raise_os_error);
    nb::register_exception_translator(raise_cuda_error);
    bind_kernels(m);
    bind_cuda_device(m);
    bind_cuda_event(m);
    bind_cuda_stream(m);
    bind_host_buffer(m);
    bind_state_file(m);
    bind_identity(m);
    bind_adam_step(m);
    bind_adagrad_step(m);
    bind_sgd_step(m);
    bind_segment(m);
    bind_operation(m);
    bind_blocks(m);
    bind_gradient_codecs(m);
    bind_tasklet(m);
    bind_batch(m);
    bind_gradients(m);
    bind_schedule(m);
    bind_results(m);
    bind_io_engines(m);
    bind_card(m);
    bind_pipeline(m);
    bind_file_queue(m);
    bind_inject<PythonPipeline>(m, "pipeline");
    bind_inject<PythonFileQueue>(m, "queue");
    bind_throttle(m);
    bind_use_cuda_library(m);
}
