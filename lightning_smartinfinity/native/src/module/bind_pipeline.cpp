// What works batches.

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
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
                PipelineOptions options{std::move(files),
                                        identity,
                                        num_buffers,
                                        buffer_bytes,
                                        io_threads,
                                        compute_threads,
                                        io_engine_of(io_engine),
                                        {std::move(resident_bytes), resident_through}};
                if (card) options = with_card(std::move(options), std::move(*card));
                new (self) PythonPipeline("Pipeline", std::make_shared<Pipeline>(std::move(options)));
            },
            nb::kw_only(), "files"_a, "identity"_a, "num_buffers"_a, "buffer_bytes"_a, "io_threads"_a = 4,
            "compute_threads"_a = 1, "io_engine"_a = "auto", "resident_bytes"_a = std::vector<std::size_t>(),
            "resident_through"_a = true, "card"_a = nb::none())
        .def_prop_ro(
            "io_engine", [](const PythonPipeline& self) { return name_of(self.get()->io_engine()); },
            "The engine in use: one of io_engines().")
        .def_prop_ro("ring_bytes", [](const PythonPipeline& self) { return self.report().ring_bytes; })
        .def_prop_ro(
            "cache_bytes", [](const PythonPipeline& self) { return self.report().cache_bytes; },
            "Of resident tasklets.")
        .def("submit", method(&Pipeline::submit), "batch"_a, WithoutGil(),
             "Start a batch; returns at once. Memory it names must stay until drain().\n\n"
             "Raises:\n    ValueError: The batch cannot be worked, or another one is active.")
        .def("extend", method(&Pipeline::extend), "more"_a, WithoutGil(),
             "Add tasklets behind those of the active batch; returns at once. They are counted on from its last.\n\n"
             "Raises:\n    ValueError: They cannot be worked, are of another operation or on a CUDA device, or no "
             "batch\n"
             "        is active.")
        .def("prefer", method(&Pipeline::prefer), "positions"_a, WithoutGil(),
             "Of these tasklets of the active batch those that have not begun are begun next, in this order.")
        .def(
            "wait",
            [](PythonPipeline& self, std::size_t first, std::optional<std::size_t> last) {
                return self.get()->wait(first, last, check_signals);
            },
            "first"_a = 0, "last"_a = nb::none(), WithoutGil(),
            "Until batch tasklets [first, last) have their parameters and arrays out, or the batch failed.\n\n"
            "A signal handler that raises, as that of Ctrl-C, ends the wait; the batch goes on.")
        .def(
            "wait_for",
            [](PythonPipeline& self, const std::vector<std::size_t>& positions) {
                return self.get()->wait_for(positions, check_signals);
            },
            "positions"_a, WithoutGil(),
            "As wait(), for tasklets anywhere in the batch, as counted in it; those that have not begun are preferred.")
        .def(
            "drain", [](PythonPipeline& self) { return self.get()->drain(check_signals); }, WithoutGil(),
            "Until nothing is in flight; the batch is over. A signal handler may end the wait, as in wait().")
        .def("abandon", method(&Pipeline::abandon), WithoutGil(),
             "End the batch, whose waiters get a failure, once nothing is in flight: what has not begun is not done.")
        .def("finished", method(&Pipeline::complete), WithoutGil(),
             "Positions in the active batch, or the last, of tasklets that are wholly done: their outputs in memory,\n"
             "their extents written.")
        .def_prop_ro(
            "busy", method(&Pipeline::busy), WithoutGil(),
            "Whether something of a card's that timed out has not returned; no batch may be submitted until then.")
        .def("writes_out", &writes_out, WithoutGil(),
             "(offset, nbytes) in a card's file of each write that timed out and has not returned: it may still write.")
        .def("counters",
             [](const PythonPipeline& self) {
                 const Pipeline::Report report = self.report();
                 return PythonCounters{report.counters, report.traffic};
             })
        .def("close", &PythonPipeline::close, WithoutGil(),
             "Abandon the batch, whose waiters get a failure; wait for what is in flight. Idempotent.");
}

}  // namespace smart_infinity
