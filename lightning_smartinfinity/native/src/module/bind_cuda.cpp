// Binds CUDA devices, events and streams.

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <cstddef>
#include <memory>

#include "cuda/cuda_device.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

CudaStreamHandle stream_of(Address handle) { return reinterpret_cast<CudaStreamHandle>(handle); }

void bind_cuda_device(nb::module_& m) {
    nb::class_<CudaDevice>(
        m, "CudaDevice",
        "A CUDA device, used through its primary context and the driver's library, opened at run time.\n\n"
        "Copies run in a stream's order; their memory must stay until they have completed. Streams are\n"
        "handles such as torch's `cuda_stream`; 0 is the default stream. Not usable in a forked child.\n\n"
        "Raises:\n    CudaError: There is no driver or no such device, or a call failed.")
        .def(nb::init<int>(), "index"_a)
        .def_prop_ro("index", &CudaDevice::index)
        .def_prop_ro("registration_failure", &CudaDevice::registration_failure,
                     "Why registering host memory failed; empty if it never failed.")
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
                          "A point in a stream's order; record() moves it.\n\n"
                          "Raises:\n    CudaError: A call or the work before the point failed.")
        .def(nb::init<std::shared_ptr<const CudaDevice>>(), "device"_a)
        .def(
            "record", [](const CudaEvent& self, Address stream) { self.record(stream_of(stream)); }, "stream"_a,
            WithoutGil(), "Set the point after all work queued on the stream so far.")
        .def("synchronize", &CudaEvent::synchronize, WithoutGil(), "Wait until the work before the point is done.")
        .def("done", &CudaEvent::done, WithoutGil(), "Return whether the work before the point is done.")
        .def(
            "hold", [](const CudaEvent& self, Address stream) { self.hold(stream_of(stream)); }, "stream"_a,
            WithoutGil(), "Make all work queued on the stream from now on run after the point.");
}

void bind_cuda_stream(nb::module_& m) {
    nb::class_<CudaStream>(m, "CudaStream",
                           "A stream of our own, without implicit order with any other.\n\n"
                           "Raises:\n    CudaError: A call failed.")
        .def(nb::init<std::shared_ptr<const CudaDevice>>(), "device"_a)
        .def_prop_ro("handle", [](const CudaStream& self) { return reinterpret_cast<Address>(self.handle()); })
        .def(
            "follow", [](const CudaStream& self, Address other) { self.follow(stream_of(other)); }, "other"_a,
            WithoutGil(), "Make this stream's later work run after the work that is in the other stream now.")
        .def(
            "lead", [](const CudaStream& self, Address other) { self.lead(stream_of(other)); }, "other"_a, WithoutGil(),
            "Make the other stream's later work run after the work that is in this stream now.");
}

}  // namespace

void bind_cuda(nb::module_& m) {
    bind_cuda_device(m);
    bind_cuda_event(m);
    bind_cuda_stream(m);
}

}  // namespace smart_infinity
