// Binds the watch over other ranks' processes.

#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "module/closable.hpp"
#include "module/module.hpp"
#include "watch/rank_watch.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

using PythonRankWatch = Closable<RankWatch>;

WatchOptions::Duration milliseconds(double seconds) {
    return std::chrono::duration_cast<WatchOptions::Duration>(std::chrono::duration<double>(seconds));
}

}  // namespace

void bind_watch(nb::module_& m) {
    m.attr("RANK_LOST_STATUS") = kRankLostStatus;
    nb::class_<RankNotice>(m, "RankNotice", "A rank and what happened to it.")
        .def_ro("rank", &RankNotice::rank)
        .def_ro("why", &RankNotice::why, "Words that complete \"the rank ...\".");
    nb::class_<WatchReport>(m, "WatchReport", "A watch's report on the other ranks.")
        .def_ro("lost", &WatchReport::lost, "The first rank that was killed or does not answer.")
        .def_ro("failed", &WatchReport::failed, "The first rank whose training an error ends.")
        .def_ro("asked", &WatchReport::asked, "The first rank that received SIGTERM; it may be this one.")
        .def_ro("left", &WatchReport::left, "The first rank that ended normally.")
        .def_ro("diverged", &WatchReport::diverged, "Where ranks wait for each other at different places.");
    nb::class_<RankPlace>(m, "RankPlace", "Where a rank has been for a while.")
        .def_ro("where", &RankPlace::where, "The place in the rank's own words; empty if it makes progress.")
        .def_ro("seconds", &RankPlace::seconds, "Seconds since the report.");
    nb::class_<PythonRankWatch>(
        m, "RankWatch",
        "Watches whether the other ranks' processes are alive, in a thread that does not need Python.\n\n"
        "Rank 0 has a connected socket for each other rank, and these have one for rank 0. If a rank is lost, each\n"
        "rank reports it on stderr, and a process that still trains `grace` seconds later ends with RANK_LOST_STATUS.\n"
        "After SIGTERM, or an error on another rank, it ends after `patience` seconds; after SIGTERM it may take\n"
        "longer to end a long batch or a checkpoint. Not usable in a forked child.\n\n"
        "Raises:\n    OSError: The thread, or an event for it, is unavailable.")
        .def(
            "__init__",
            [](PythonRankWatch* self, int rank, std::vector<std::string> hosts,
               std::vector<std::pair<int, int>> sockets, double silence, double grace, double patience) {
                WatchOptions options{.rank = rank,
                                     .hosts = std::move(hosts),
                                     .sockets = std::move(sockets),
                                     .silence = milliseconds(silence),
                                     .grace = milliseconds(grace),
                                     .patience = milliseconds(patience)};
                new (self) PythonRankWatch("RankWatch", std::make_shared<RankWatch>(std::move(options)));
            },
            nb::kw_only(), "rank"_a, "hosts"_a, "sockets"_a, "silence"_a, "grace"_a, "patience"_a)
        .def("begin_training", method(&RankWatch::begin_training), WithoutGil(),
             "From now on, report this rank lost if it ends, and end it if another one is lost.")
        .def("end_training", method(&RankWatch::end_training), WithoutGil(),
             "From now on this rank may end, and is not ended. Lost ranks stay lost.")
        .def("hear_sigterm", method(&RankWatch::hear_sigterm), WithoutGil(),
             "Install a SIGTERM handler that runs before the present one.")
        .def("tell_sigterm", method(&RankWatch::tell_sigterm), WithoutGil(),
             "Inform all ranks that this one received SIGTERM.")
        .def("tell_failure", method(&RankWatch::tell_failure), "why"_a, WithoutGil(),
             "Inform the other ranks that an error ends this rank's training.")
        .def("note_batch", method(&RankWatch::note_batch), WithoutGil(),
             "Record the start of a batch. After SIGTERM this rank may go on for twice the longest batch, if that\n"
             "exceeds `patience`.")
        .def("begin_saving", method(&RankWatch::begin_saving), WithoutGil(),
             "From now on SIGTERM does not end this rank, until end_saving().")
        .def("end_saving", method(&RankWatch::end_saving), WithoutGil(),
             "Record that a checkpoint was saved, or could not be; `patience` then starts anew.")
        .def("agree", method(&RankWatch::agree), WithoutGil(),
             "Disable the time limit: all ranks have agreed to end their training.")
        .def("tell_place", method(&RankWatch::tell_place), "where"_a, WithoutGil(),
             "Report to rank 0 where this rank is blocked; an empty text means that it makes progress.")
        .def("places", method(&RankWatch::places), WithoutGil(),
             "Return the last reported place of each rank; complete on rank 0 only.")
        .def("tell_divergence", method(&RankWatch::tell_divergence), "where"_a, WithoutGil(),
             "Inform all ranks that they wait for each other at different places.")
        .def(
            "wait", [](PythonRankWatch& self, double limit) { return self.get()->wait(milliseconds(limit)); },
            "limit"_a, WithoutGil(),
            "Return the report once a rank is lost, has failed or has ended, or the ranks have diverged, or else\n"
            "after `limit` seconds.")
        .def("report", &PythonRankWatch::report, WithoutGil(), "Return the report, also after close().")
        .def("close", &PythonRankWatch::close, WithoutGil(), "Inform the other ranks, and end the thread; idempotent.");
}

}  // namespace smart_infinity
