// Binds the queue that reads and writes plain files.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/buffer.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

FileQueue::Ticket submit(const PythonFileQueue& queue, Direction direction, const StateFile& file, std::uint64_t offset,
                         Address address, std::size_t nbytes) {
    const StateFile held = file;  // another thread may close it meanwhile
    const nb::gil_scoped_release release;
    return queue.get()->submit(direction, held, offset, reinterpret_cast<std::byte*>(address), nbytes);
}

// The kernel registers at most one GiB at a time.
MemoryRange registered_range(const HostBuffer& memory) {
    return {memory.data(), memory.bytes(), std::min(memory.bytes(), std::size_t{1} << 30)};
}

}  // namespace

void bind_file_queue(nb::module_& m) {
    nb::class_<PythonFileQueue>(
        m, "FileQueue",
        "Reads and writes files in the background; large requests run in parallel parts.\n\n"
        "`memory` is the memory that most requests will use: an engine that gains by it registers it once.\n"
        "A direct file needs offset, address and nbytes to be multiples of 4096. Not usable in a forked child.\n\n"
        "A request that does not return within timeout_ms is abandoned; None: no limit. While the queue is busy, the\n"
        "caller keeps the memory of such requests.\n\n"
        "Raises:\n    ValueError: A number is out of range.\n"
        "    OSError: Threads or the I/O engine are unavailable.")
        .def(
            "__init__",
            [](PythonFileQueue* self, std::size_t io_threads, const std::string& io_engine, const HostBuffer* memory,
               std::optional<std::int64_t> timeout_ms) {
                const MemoryRange range = memory ? registered_range(*memory) : MemoryRange{};
                std::optional<FileQueue::Deadline> deadline;
                if (const auto timeout = timeout_of(timeout_ms)) deadline = FileQueue::Deadline{*timeout};
                new (self) PythonFileQueue(
                    "FileQueue", std::make_shared<FileQueue>(io_threads, io_engine_of(io_engine), range, deadline));
            },
            nb::kw_only(), "io_threads"_a = 4, "io_engine"_a = "auto", "memory"_a = nb::none(),
            "timeout_ms"_a = nb::none(), nb::keep_alive<1, 4>())
        .def(
            "read",
            [](PythonFileQueue& self, const StateFile& file, std::uint64_t offset, Address address,
               std::size_t nbytes) { return submit(self, Direction::kRead, file, offset, address, nbytes); },
            "file"_a, nb::kw_only(), "offset"_a, "address"_a, "nbytes"_a,
            "Start reading and return a ticket. The memory must stay until wait().\n\n"
            "Raises:\n    ValueError: The bytes cannot be transferred.")
        .def(
            "write",
            [](PythonFileQueue& self, const StateFile& file, std::uint64_t offset, Address address,
               std::size_t nbytes) { return submit(self, Direction::kWrite, file, offset, address, nbytes); },
            "file"_a, nb::kw_only(), "offset"_a, "address"_a, "nbytes"_a,
            "Start writing and return a ticket. The memory must stay, unchanged, until wait().\n\n"
            "Raises:\n    ValueError: The bytes cannot be transferred.")
        .def(
            "wait",
            [](PythonFileQueue& self, FileQueue::Ticket ticket) { return self.get()->wait(ticket, check_signals); },
            "ticket"_a, WithoutGil(),
            "Wait until the request has ended. Return its failure, if any, to the first wait only.\n\n"
            "A signal handler that raises, such as that of Ctrl-C, ends the wait; the request continues, its ticket\n"
            "stays open and its memory in use.\n\n"
            "Raises:\n    ValueError: There is no such ticket.")
        .def_prop_ro(
            "io_engine", [](const PythonFileQueue& self) { return name_of(self.get()->io_engine()); },
            "The engine in use: one of io_engines().")
        .def("counters", [](const PythonFileQueue& self) { return PythonCounters{self.report(), {}}; })
        .def_prop_ro("busy", method(&FileQueue::busy), "Whether an abandoned request has not returned.")
        .def("close", &PythonFileQueue::close, WithoutGil(),
             "Wait for requests in flight, except abandoned ones, which keep their memory and file for ever. "
             "Idempotent.");
}

}  // namespace smart_infinity
