// Binds host memory, files and their scheduler.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "cuda/cuda_device.hpp"
#include "io/io_scheduler.hpp"
#include "io/state_file.hpp"
#include "module/memory_view.hpp"
#include "module/module.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

void bind_host_buffer(nb::module_& m) {
    nb::class_<HostBuffer> bound(
        m, "HostBuffer", nb::type_slots(buffer_slots<HostBuffer>),
        "Zero-filled, page-aligned memory (2 MiB-aligned from that size on), absent from forked children.\n\n"
        "Raises:\n    ValueError: nbytes is 0.\n    OSError: The memory cannot be mapped.");
    bind_memory_view(bound)
        .def(nb::init<std::size_t>(), "nbytes"_a)
        .def(
            "register",
            [](HostBuffer& self, std::shared_ptr<const CudaDevice> device) {
                return self.try_register(std::move(device));
            },
            "device"_a, WithoutGil(),
            "Make copies from and to the device asynchronous, until unregister() or the end of the memory.\n\n"
            "Returns whether it succeeded; if not, the device's registration_failure has the reason.")
        .def("unregister", &HostBuffer::unregister, WithoutGil(), "End the registration; idempotent.");
}

using WaitRow = std::tuple<std::string, std::string, std::uint64_t, std::uint64_t, double>;

std::vector<WaitRow> waits_of(const IoScheduler& scheduler) {
    std::vector<WaitRow> rows;
    const IoWaitTable table = scheduler.waits();
    for (std::size_t waiting = 0; waiting < kNumIoClasses; ++waiting) {
        for (std::size_t other = 0; other < kNumIoClasses; ++other) {
            const IoWaits& waits = table[waiting][other];
            if (waits.requests == 0) continue;
            rows.emplace_back(name_of(static_cast<IoClass>(waiting)), name_of(static_cast<IoClass>(other)),
                              waits.requests, waits.bytes, waits.seconds);
        }
    }
    return rows;
}

void bind_scheduler(nb::module_& m) {
    nb::enum_<IoClass>(m, "IoClass", "The purpose of a transfer, most urgent first.")
        .value("AWAITED", IoClass::kAwaited, "Forward or backward waits for it.")
        .value("GATHER", IoClass::kGather, "Tasklets of parameters that are about to be gathered.")
        .value("STATE", IoClass::kState, "Other tasklets.")
        .value("WRITE_BEHIND", IoClass::kWriteBehind, "Memory that is freed after it has been written.")
        .value("BACKGROUND", IoClass::kBackground, "Copies and checks that no caller waits for.");
    nb::class_<IoScheduler>(
        m, "IoScheduler",
        "Starts the requests to one device's files in the order of their classes. At most `in_flight_bytes`, or the\n"
        "bytes of the largest ring if these are more, are in flight, in equal shares for the `num_processes` that use\n"
        "the device. A larger request runs alone.")
        .def(nb::new_([](std::size_t in_flight_bytes, std::size_t num_processes) {
                 return std::make_shared<IoScheduler>(in_flight_bytes, std::max<std::size_t>(num_processes, 1));
             }),
             nb::kw_only(), "in_flight_bytes"_a = IoScheduler::kInFlightBytes, "num_processes"_a = 1)
        .def_prop_ro("in_flight_bytes", &IoScheduler::in_flight_bytes,
                     "Bytes that this process may have in flight now.")
        .def("waits", &waits_of,
             "Return the waits since creation, one row for each pair of classes that has any:\n\n"
             "- name of the class that waited\n"
             "- name of the class that it waited for\n"
             "- number of requests that waited\n"
             "- bytes of the other class that were transferred meanwhile\n"
             "- seconds of waiting, divided among the other classes in proportion to these bytes");
}

void bind_state_file(nb::module_& m) {
    nb::class_<StateFile>(
        m, "StateFile",
        "One open descriptor of an existing file, close-on-exec.\n\n"
        "A pipeline that uses it keeps the descriptor open until the pipeline is closed too. Its transfers take turns\n"
        "at `scheduler`, if there is one.\n\n"
        "Raises:\n    OSError: A call failed; it has errno and filename.")
        .def(
            "__init__",
            [](StateFile* self, std::string path, bool direct, std::optional<int> descriptor,
               std::shared_ptr<IoScheduler> scheduler) {
                const Access access = direct ? Access::kDirect : Access::kBuffered;
                if (descriptor) {
                    new (self) StateFile(std::move(path), access, *descriptor, std::move(scheduler));
                } else {
                    new (self) StateFile(std::move(path), access, std::move(scheduler));
                }
            },
            "path"_a, nb::kw_only(), "direct"_a, "descriptor"_a = nb::none(), "scheduler"_a = nb::none(),
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
    bind_scheduler(m);
    bind_state_file(m);
}

}  // namespace smart_infinity
