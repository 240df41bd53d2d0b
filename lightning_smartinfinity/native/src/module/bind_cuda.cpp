// Binds CUDA devices, events, streams, and the ring of gradients.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "cuda/cuda_device.hpp"
#include "cuda/gradient_ring.hpp"
#include "extent/ready_point.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"

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
    nb::class_<ReadyPoint>(m, "ReadyPoint", "A point that a batch waits for before it computes.")
        .def("synchronize", &ReadyPoint::synchronize, WithoutGil(),
             "Wait until the work before the point is done.\n\nRaises:\n    CudaError: That work failed.");
    nb::class_<CudaEvent, ReadyPoint>(m, "CudaEvent",
                                      "A point in a stream's order; record() moves it.\n\n"
                                      "Raises:\n    CudaError: A call or the work before the point failed.")
        .def(nb::init<std::shared_ptr<const CudaDevice>>(), "device"_a)
        .def(
            "record", [](const CudaEvent& self, Address stream) { self.record(stream_of(stream)); }, "stream"_a,
            WithoutGil(), "Set the point after all work queued on the stream so far.")
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

using PythonGradientRing = Closable<GradientRing>;

void bind_gradient_ring(nb::module_& m) {
    nb::class_<GradientsArrived, ReadyPoint>(m, "GradientsArrived",
                                             "The point after which gradients that were pushed are in host memory.");
    nb::class_<PythonGradientRing>(
        m, "GradientRing",
        "Carries gradients from a CUDA device to host memory, through registered slots and on a stream of its own, "
        "and\n"
        "adds and squares them in threads. No bit depends on slots or threads. Not usable in a forked child.\n\n"
        "Args:\n"
        "    device: The device.\n"
        "    slot_bytes: Size of a slot: a multiple of 64, at least 128.\n"
        "    num_slots: Number of slots.\n"
        "    num_threads: Number of threads that add.\n"
        "    most_bytes: Bytes of gradients on the device above which push() waits.\n\n"
        "Raises:\n    ValueError: A number is out of range.\n    OSError: Memory or threads are unavailable.\n"
        "    CudaError: A call failed.")
        .def(
            "__init__",
            [](PythonGradientRing* self, const std::shared_ptr<const CudaDevice>& device, std::size_t slot_bytes,
               std::size_t num_slots, std::size_t num_threads, std::size_t most_bytes) {
                const GradientRing::Options options{slot_bytes, num_slots, num_threads, most_bytes};
                new (self) PythonGradientRing("GradientRing", std::make_shared<GradientRing>(device, options));
            },
            "device"_a, nb::kw_only(), "slot_bytes"_a, "num_slots"_a, "num_threads"_a, "most_bytes"_a)
        .def(
            "push",
            [](const PythonGradientRing& self, std::uint64_t key, Address source, std::size_t numel, DType dtype,
               Address sum, DType sum_dtype, bool adds, Address after) {
                return self.get()->push({key, source, numel, dtype, reinterpret_cast<std::byte*>(sum), sum_dtype, adds},
                                        stream_of(after), check_signals);
            },
            nb::kw_only(), "key"_a, "source"_a, "numel"_a, "dtype"_a, "sum"_a, "sum_dtype"_a, "adds"_a, "after"_a,
            WithoutGil(),
            "Start to carry a gradient and return its ticket. Its memory, and that of the sum, must stay until the\n"
            "ticket is done. Waits while too many bytes are on their way; Ctrl-C ends the wait. After a failure it "
            "does\n"
            "nothing.\n\n"
            "Args:\n"
            "    key: Gradients of one key are added in order.\n"
            "    source: Address on the device.\n"
            "    numel: Number of elements.\n"
            "    dtype: Type of the gradient.\n"
            "    sum: Address in host memory.\n"
            "    sum_dtype: Type of the sum.\n"
            "    adds: Whether to add the gradient to the sum instead of storing it there.\n"
            "    after: Handle of a stream: the gradient exists after its present work.")
        .def("done", method(&GradientRing::done), "ticket"_a, WithoutGil(),
             "Return whether all gradients up to the ticket's are in the sums, or given up after a failure.")
        .def(
            "wait",
            [](const PythonGradientRing& self, std::optional<GradientRing::Ticket> ticket) {
                const auto ring = self.get();
                ring->wait(ticket.value_or(ring->pushed()), check_signals);
            },
            "ticket"_a = nb::none(), WithoutGil(),
            "Wait until done(); without a ticket, for all gradients. Ctrl-C ends the wait.\n\n"
            "Raises:\n    CudaError: A copy has failed since the last reset().")
        .def(
            "point",
            [](const PythonGradientRing& self) {
                const auto ring = self.get();
                return std::make_shared<GradientsArrived>(ring, ring->pushed());
            },
            WithoutGil(), "Return the point after which all gradients pushed so far are in the sums.")
        .def("take_squares", method(&GradientRing::take_squares), WithoutGil(),
             "Return (key, sum of squares of the new sum) of the gradients that are done, in order, and forget them.")
        .def(
            "reset", [](const PythonGradientRing& self) { self.get()->reset(check_signals); }, WithoutGil(),
            "Wait until nothing is on its way, and forget squares and failures. Ctrl-C ends the wait.")
        .def_prop_ro("nbytes", [](const PythonGradientRing& self) { return self.report().ring_bytes; })
        .def_prop_ro(
            "wait_seconds", [](const PythonGradientRing& self) { return self.report().wait_seconds; },
            "Time that push() waited.")
        .def("close", &PythonGradientRing::close, WithoutGil(),
             "Wait until nothing is on its way, and free memory and threads. Idempotent.");
}

}  // namespace

void bind_cuda(nb::module_& m) {
    bind_cuda_device(m);
    bind_cuda_event(m);
    bind_cuda_stream(m);
    bind_gradient_ring(m);
}

}  // namespace smart_infinity
