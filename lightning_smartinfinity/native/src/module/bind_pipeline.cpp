// Binds the pipeline.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "card/card_updater.hpp"
#include "module/module.hpp"
#include "module/workers.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

std::vector<std::pair<std::uint64_t, std::size_t>> writes_out(const PythonPipeline& pipeline) {
    std::vector<std::pair<std::uint64_t, std::size_t>> ranges;
    for (const IoRequest& write : pipeline.get()->abandoned_writes()) ranges.emplace_back(write.offset, write.bytes);
    return ranges;
}

}  // namespace

void bind_pipeline(nb::module_& m) {
    m.attr("MAX_BUFFERS") = kMaxBuffers;
    m.attr("MAX_THREADS") = kMaxThreads;
    nb::class_<PythonPipeline>(
        m, "Pipeline",
        "Works batches of tasklets in a ring of buffers: reads, compute and writes overlap.\n\n"
        "The first failure stops new work; wait() returns it from then on, finish() returns it and ends the\n"
        "batch. Not usable in a forked child.\n\n"
        "io_engine is one of io_engines(), or \"auto\": the fastest that works here for these files.\n\n"
        "The first len(resident_bytes) tasklets are resident: their state stays in host memory. resident_bytes has\n"
        "the sizes of their extents. Unless resident_through, their state is never on storage. resident_memory holds\n"
        "whole extents in this order; if it is empty, the pipeline allocates that memory.\n\n"
        "A card, if given, works the batches, in a ring of its own memory, and I/O runs in threads. More than one\n"
        "compute thread lets the gradient of a tasklet travel while another is updated.\n\n"
        "A request to storage that does not return within timeout_ms is abandoned; None: no limit. A card has its own."
        "\n\n"
        "Raises:\n    ValueError: A size or number is out of range.\n"
        "    OSError: Memory, threads or the I/O engine are unavailable.\n"
        "    CardError: The card fails, or has too little memory.")
        .def(
            "__init__",
            [](PythonPipeline* self, std::vector<StateFile> files, const Identity& identity, std::size_t num_buffers,
               std::size_t buffer_bytes, std::size_t io_threads, std::size_t compute_threads,
               const std::string& io_engine, std::vector<std::size_t> resident_bytes, bool resident_through,
               std::vector<std::shared_ptr<HostBuffer>> resident_memory, std::optional<CardOptions> card,
               std::optional<std::int64_t> timeout_ms) {
                const nb::gil_scoped_release release;  // a card may need the lock to answer
                PipelineOptions options{std::move(files),
                                        identity,
                                        num_buffers,
                                        buffer_bytes,
                                        io_threads,
                                        compute_threads,
                                        io_engine_of(io_engine),
                                        {std::move(resident_bytes), resident_through, std::move(resident_memory)}};
                options.timeout = timeout_of(timeout_ms);
                if (card) options = with_card(std::move(options), std::move(*card));
                new (self) PythonPipeline("Pipeline", std::make_shared<Pipeline>(std::move(options)));
            },
            nb::kw_only(), "files"_a, "identity"_a, "num_buffers"_a, "buffer_bytes"_a, "io_threads"_a = 4,
            "compute_threads"_a = 1, "io_engine"_a = "auto", "resident_bytes"_a = std::vector<std::size_t>(),
            "resident_through"_a = true, "resident_memory"_a = std::vector<std::shared_ptr<HostBuffer>>(),
            "card"_a = nb::none(), "timeout_ms"_a = nb::none())
        .def_prop_ro(
            "io_engine", [](const PythonPipeline& self) { return name_of(self.get()->io_engine()); },
            "The engine in use: one of io_engines().")
        .def_prop_ro("ring_bytes", [](const PythonPipeline& self) { return self.report().ring_bytes; })
        .def_prop_ro(
            "cache_bytes", [](const PythonPipeline& self) { return self.report().cache_bytes; },
            "Host memory of resident tasklets.")
        .def("submit", method(&Pipeline::submit), "batch"_a, WithoutGil(),
             "Start a batch and return at once. The memory that it names must stay until finish().\n\n"
             "Raises:\n    ValueError: The batch cannot be worked, or another one is active.")
        .def("extend", method(&Pipeline::extend), "more"_a, WithoutGil(),
             "Append tasklets to the active batch and return at once. Their positions continue those of the batch.\n\n"
             "Raises:\n    ValueError: They cannot be worked, have another operation or are on a CUDA device, or no\n"
             "        batch is active.")
        .def("prefer", method(&Pipeline::prefer), "positions"_a, WithoutGil(),
             "Move these tasklets of the active batch, in this order, ahead of the others that have not started.")
        .def(
            "wait",
            [](PythonPipeline& self, std::size_t first, std::optional<std::size_t> last) {
                return self.get()->wait(first, last, check_signals);
            },
            "first"_a = 0, "last"_a = nb::none(), WithoutGil(),
            "Wait until tasklets [first, last) of the batch have their parameters and arrays out, or the batch "
            "failed.\n\n"
            "A signal handler that raises, such as that of Ctrl-C, ends the wait; the batch continues.")
        .def(
            "wait_for",
            [](PythonPipeline& self, const std::vector<std::size_t>& positions) {
                return self.get()->wait_for(positions, check_signals);
            },
            "positions"_a, WithoutGil(),
            "Wait as wait() does, for tasklets at any positions in the batch, which are moved ahead of the others.")
        .def(
            "finish", [](PythonPipeline& self) { return self.get()->finish(check_signals); }, WithoutGil(),
            "Wait until nothing is in flight; the batch is then over. A signal handler may end the wait, as in wait().")
        .def(
            "stop", [](PythonPipeline& self) { self.get()->stop(check_signals); }, WithoutGil(),
            "End the batch without starting more of it; wait until nothing is in flight. Waits for the batch fail.\n\n"
            "What a signal handler raises meanwhile, such as that of Ctrl-C, is raised at the end.")
        .def("finished", method(&Pipeline::complete), WithoutGil(),
             "Return the positions, in the active or else the last batch, of complete tasklets: their outputs are in\n"
             "memory and their extents written.")
        .def_prop_ro("busy", method(&Pipeline::busy), WithoutGil(),
                     "Whether a call or transfer that timed out is unfinished.")
        .def("accepts", method(&Pipeline::accepts), WithoutGil(), "batch"_a,
             "Return whether a batch may be submitted: while busy, only updates of state in memory, without writes.")
        .def("writes_out", &writes_out, WithoutGil(),
             "Return (offset, nbytes) in its file of each write that timed out and may still change the file.")
        .def("counters",
             [](const PythonPipeline& self) {
                 const Pipeline::Report report = self.report();
                 return PythonCounters{report.counters, report.traffic};
             })
        .def("close", &PythonPipeline::close, WithoutGil(), "Stop the batch and close the pipeline; idempotent.");
}

}  // namespace smart_infinity
