// Binds host memory and files.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "base/buffer.hpp"
#include "cuda/cuda_device.hpp"
#include "io/state_file.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

// Implements the buffer protocol: a memoryview holds a reference, and with it the mapping.
int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const HostBuffer* const buffer = nb::inst_ptr<HostBuffer>(self);
    return PyBuffer_FillInfo(view, self, buffer->data(), static_cast<Py_ssize_t>(buffer->bytes()), 0, flags);
}

PyType_Slot host_buffer_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(get_buffer)}, {0, nullptr}};

void bind_host_buffer(nb::module_& m) {
    nb::class_<HostBuffer>(
        m, "HostBuffer", nb::type_slots(host_buffer_slots),
        "Zero-filled, page-aligned memory (2 MiB-aligned from that size on), absent from forked children.\n\n"
        "Raises:\n    ValueError: nbytes is 0.\n    OSError: The memory cannot be mapped.")
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def_prop_ro("address", [](const HostBuffer& self) { return reinterpret_cast<Address>(self.data()); })
        .def_prop_ro("nbytes", &HostBuffer::bytes)
        .def(
            "register",
            [](HostBuffer& self, std::shared_ptr<const CudaDevice> device) {
                return self.try_register(std::move(device));
            },
            "device"_a, WithoutGil(),
            "Make copies from and to the device asynchronous, until unregister() or the end of the memory.\n\n"
            "Returns whether it worked; if not, the device's registration_failure says why.")
        .def("unregister", &HostBuffer::unregister, WithoutGil(), "End the registration; idempotent.")
        .def(
            "memoryview",
            [](nb::handle self) {
                PyObject* const view = PyMemoryView_FromObject(self.ptr());
                if (view == nullptr) throw nb::python_error();
                return nb::steal(view);
            },
            nb::sig("def memoryview(self) -> builtins.memoryview"),
            "Return the writable bytes; the view keeps the buffer alive.");
}

void bind_state_file(nb::module_& m) {
    nb::class_<StateFile>(m, "StateFile",
                          "One open descriptor of an existing file, close-on-exec.\n\n"
                          "A pipeline that uses it keeps the descriptor open until the pipeline is closed too.\n\n"
                          "Raises:\n    OSError: A call failed; it has errno and filename.")
        .def(
            "__init__",
            [](StateFile* self, std::string path, bool direct, std::optional<int> descriptor) {
                const Access access = direct ? Access::kDirect : Access::kBuffered;
                if (descriptor) {
                    new (self) StateFile(std::move(path), access, *descriptor);
                } else {
                    new (self) StateFile(std::move(path), access);
                }
            },
            "path"_a, nb::kw_only(), "direct"_a, "descriptor"_a = nb::none(),
            "Open a file by its path, or take over a descriptor that is open already (with O_DIRECT if direct).")
        .def_prop_ro("path", &StateFile::path)
        .def_prop_ro("direct", [](const StateFile& self) { return self.access() == Access::kDirect; })
        .def(
            "sync",
            [](const StateFile& self) {
                const StateFile file = self;  // another thread may close it meanwhile
                const nb::gil_scoped_release release;
                file.sync();
            },
            "Call fdatasync(); raises OSError.")
        .def("close", &StateFile::close, "Close the file; idempotent.");
}

}  // namespace

void bind_storage(nb::module_& m) {
    bind_host_buffer(m);
    bind_state_file(m);
}

}  // namespace smart_infinity
