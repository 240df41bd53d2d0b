// Binds counters, failures, the list of I/O engines and ask_to_end().

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/abandoned_call.hpp"
#include "base/ending.hpp"
#include "base/failure.hpp"
#include "io/counters.hpp"
#include "io/io_engines.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

void bind_counters(nb::module_& m) {
    nb::class_<FileCounters>(m, "FileCounters", "Counters of one file, since creation.")
        .def_ro("read_bytes", &FileCounters::read_bytes)
        .def_ro("written_bytes", &FileCounters::written_bytes)
        .def_ro("busy_seconds", &FileCounters::busy_seconds, "Time with at least one request in progress.");
    nb::class_<PythonCounters>(m, "Counters", "Counters since creation. Seconds are summed over threads.")
        .def_ro("read_bytes", &PythonCounters::read_bytes)
        .def_ro("written_bytes", &PythonCounters::written_bytes)
        .def_ro("read_calls", &PythonCounters::read_calls)
        .def_ro("write_calls", &PythonCounters::write_calls)
        .def_ro("num_abandoned", &PythonCounters::num_abandoned, "Requests that did not return in time.")
        .def_ro("cached_read_bytes", &PythonCounters::cached_read_bytes, "Resident bytes that were not read.")
        .def_ro("cached_write_bytes", &PythonCounters::cached_write_bytes, "Resident bytes that were not written.")
        .def_ro("shared_read_bytes", &PythonCounters::shared_read_bytes, "Bytes from a card to the host.")
        .def_ro("shared_write_bytes", &PythonCounters::shared_write_bytes, "Bytes from the host to a card.")
        .def_ro("internal_read_bytes", &PythonCounters::internal_read_bytes, "Bytes from storage to a card.")
        .def_ro("internal_write_bytes", &PythonCounters::internal_write_bytes, "Bytes from a card to storage.")
        .def_ro("padding_bytes", &PythonCounters::padding_bytes, "Padding of a card's blocks, which these four omit.")
        .def_ro("control_bytes", &PythonCounters::control_bytes, "Bytes of a card's trailers and status beats.")
        .def_ro("gradient_file_bytes", &PythonCounters::gradient_file_bytes,
                "Bytes of blocks written to a card's gradient file and read from it.")
        .def_ro("read_seconds", &PythonCounters::read_seconds)
        .def_ro("write_seconds", &PythonCounters::write_seconds)
        .def_ro("read_busy_seconds", &PythonCounters::read_busy_seconds,
                "Time with at least one read of a queue in progress.")
        .def_ro("write_busy_seconds", &PythonCounters::write_busy_seconds,
                "Time with at least one write of a queue in progress.")
        .def_ro("compute_seconds", &PythonCounters::compute_seconds)
        .def_ro("kernel_seconds", &PythonCounters::kernel_seconds, "Time from the start of a card's runs to their end.")
        .def_ro("wait_seconds", &PythonCounters::wait_seconds)
        .def_ro("system_calls", &PythonCounters::system_calls, "System calls of the I/O engine.")
        .def_ro("io_cpu_seconds", &PythonCounters::io_cpu_seconds, "CPU time of the I/O engine's threads.")
        .def_ro("registered_bytes", &PythonCounters::registered_bytes, "Bytes of memory pinned for that engine now.")
        .def_ro("registration_errno", &PythonCounters::registration_errno, "errno if pinning that memory failed, or 0.")
        .def_ro("files", &PythonCounters::files, "Counters of a pipeline's files, by index.");
}

void bind_failure(nb::module_& m) {
    nb::class_<Failure>(m, "Failure",
                        "Why a batch stopped. kind is io, short, checksum, foreign, generation, format, cuda, device "
                        "(a card), timeout\n"
                        "(a disk that does not answer) or gradient (a compressed one); errno may be 0.")
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

void bind_io_engines(nb::module_& m) {
    m.def(
        "io_engines",
        [] {
            std::vector<std::tuple<std::string, std::optional<std::string>>> engines;
            for (const IoEngineKind kind : kIoEngineKinds) engines.emplace_back(name_of(kind), unavailable(kind));
            return engines;
        },
        "Return the I/O engines' names, fastest first, each with the reason why it is unavailable here, or None.");
}

void bind_ask_to_end(nb::module_& m) {
    m.def(
        "ask_to_end", &ask_to_end,
        "Announce that the process is to end, as after Ctrl-C. For ten seconds from now, requests to storage devices\n"
        "that do not return are abandoned after ending_seconds(), instead of after their own limit.");
    m.def("take_back_ask_to_end", &take_back_ask_to_end,
          "Cancel ask_to_end(), because the storage has answered since. Requests have their own limit again.");
    m.def(
        "ending_seconds",
        []() -> std::optional<double> {
            const auto limit = ending_limit();
            if (!limit) return std::nullopt;
            return std::chrono::duration<double>(limit->time).count();
        },
        "Return how long a wait for a storage device may last, or None if the process was not asked to end.\n\n"
        "It is three seconds until the first wait is abandoned. All later ones share one second.");
    m.def(
        "note_abandoned",
        [](double seconds) {
            using Duration = EndingClock::Clock::duration;
            const auto waited = std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
            note_abandoned(EndingClock::Clock::now() - waited);
        },
        "seconds"_a, "Record that a wait for a storage device was abandoned after `seconds`.");
    m.def("num_abandoned_calls", &num_abandoned_calls,
          "Return how many requests and calls of this core were abandoned and have not returned.");
    m.def(
        "keep_at_exit",
        [](nb::object kept) { keep_for_ever(std::shared_ptr<void>(kept.release().ptr(), [](void*) {})); }, "kept"_a,
        "Never free an object. The process will end with the same status, but without destructors of C++ and C, "
        "because\n"
        "those of the object's members may wait for a storage device.");
}

}  // namespace

void bind_results(nb::module_& m) {
    bind_counters(m);
    bind_failure(m);
    bind_io_engines(m);
    bind_ask_to_end(m);
}

}  // namespace smart_infinity
