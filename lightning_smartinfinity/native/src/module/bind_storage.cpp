// Host memory, files and what extents carry.

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/buffer.hpp"
#include "cuda/cuda_device.hpp"
#include "extent/trailer.hpp"
#include "io/state_file.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

// Buffer protocol: a memoryview holds a reference, and with it the mapping.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const HostBuffer* const buffer = nb::inst_ptr<HostBuffer>(self);
    return PyBuffer_FillInfo(view, self, buffer->data(), static_cast<Py_ssize_t>(buffer->bytes()), 0, flags);
}

PyType_Slot host_buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

void bind_host_buffer(nb::module_& m) {
    nb::class_<HostBuffer>(
        m, "HostBuffer", nb::type_slots(host_buffer_slots),
        "Zero-filled, page-aligned memory (2 MiB-aligned from that size on), absent from forked children.\n\n"
        "Raises:\n    ValueError: No bytes.\n    OSError: The memory cannot be mapped.")
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def_prop_ro("address", [](const HostBuffer& self) { return reinterpret_cast<Address>(self.data()); })
        .def_prop_ro("nbytes", &HostBuffer::bytes)
        .def(
            "register",
            [](HostBuffer& self, std::shared_ptr<const CudaDevice> device) {
                return self.try_register(std::move(device));
            },
            "device"_a, WithoutGil(),
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

}  // namespace

void bind_storage(nb::module_& m) {
    bind_host_buffer(m);
    bind_state_file(m);
    bind_identity(m);
}

}  // namespace smart_infinity
