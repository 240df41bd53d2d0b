#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.hpp"
#include "fault_injection.hpp"
#include "file_queue.hpp"
#include "pipeline.hpp"

namespace smart_infinity {
namespace {

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

void bind_results(nb::module_& m) {
    nb::class_<Counters>(m, "Counters", "Since creation. Seconds are summed over threads.")
        .def_ro("read_bytes", &Counters::read_bytes)
        .def_ro("written_bytes", &Counters::written_bytes)
        .def_ro("read_calls", &Counters::read_calls)
        .def_ro("write_calls", &Counters::write_calls)
        .def_ro("read_seconds", &Counters::read_seconds)
        .def_ro("write_seconds", &Counters::write_seconds)
        .def_ro("compute_seconds", &Counters::compute_seconds)
        .def_ro("wait_seconds", &Counters::wait_seconds);
    nb::class_<Failure>(
        m, "Failure",
        "Why a batch stopped: kind is io, short, checksum, foreign, generation, format or cuda; errno may be 0.")
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
        "Raises:\n    ValueError: A size or number is out of range.\n"
        "    OSError: Memory or threads are not to be had.")
        .def(
            "__init__",
            [](PythonPipeline* self, std::vector<StateFile> files, const Identity& identity, std::size_t num_buffers,
               std::size_t buffer_bytes, std::size_t io_threads, std::size_t compute_threads) {
                new (self) PythonPipeline(PipelineOptions{std::move(files), identity, num_buffers, buffer_bytes,
                                                          io_threads, compute_threads});
            },
            nb::kw_only(), "files"_a, "identity"_a, "num_buffers"_a, "buffer_bytes"_a, "io_threads"_a = 4,
            "compute_threads"_a = 1)
        .def_prop_ro("ring_bytes", &PythonPipeline::ring_bytes)
        .def("submit", &PythonPipeline::submit, "batch"_a, WithoutGil(),
             "Start a batch; returns at once. Memory it names must stay until drain().\n\n"
             "Raises:\n    ValueError: The batch cannot be worked, or another one is active.")
        .def(
            "wait",
            [](PythonPipeline& self, std::size_t first, std::optional<std::size_t> last) {
                return self.wait(first, last, check_signals);
            },
            "first"_a = 0, "last"_a = nb::none(), WithoutGil(),
            "Until batch tasklets [first, last) have their parameters and arrays out, or the batch failed.\n\n"
            "A signal handler that raises, as that of Ctrl-C, ends the wait; the batch goes on.")
        .def(
            "drain", [](PythonPipeline& self) { return self.drain(check_signals); }, WithoutGil(),
            "Until nothing is in flight; the batch is over. A signal handler may end the wait, as in wait().")
        .def("abandon", &PythonPipeline::abandon, WithoutGil(),
             "End the batch, whose waiters get a failure, once nothing is in flight: what has not begun is not done.")
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

void bind_file_queue(nb::module_& m) {
    nb::class_<PythonFileQueue>(
        m, "FileQueue",
        "Reads and writes files in the background; large requests run in parts, side by side.\n\n"
        "A direct file wants offset, address and nbytes to be multiples of 4096. Not usable in a forked child.\n\n"
        "Raises:\n    ValueError: A number is out of range.\n    OSError: Threads are not to be had.")
        .def(
            "__init__", [](PythonFileQueue* self, std::size_t io_threads) { new (self) PythonFileQueue(io_threads); },
            nb::kw_only(), "io_threads"_a = 4)
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

}  // namespace

void bind_transfers(nb::module_& m) {
    bind_results(m);
    bind_pipeline(m);
    bind_file_queue(m);
    bind_inject<PythonPipeline>(m, "pipeline");
    bind_inject<PythonFileQueue>(m, "queue");
}

}  // namespace smart_infinity
