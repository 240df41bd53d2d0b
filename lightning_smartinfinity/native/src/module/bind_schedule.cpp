// Binds the transfer schedule, for simulation and tests.

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "module/module.hpp"
#include "pipeline/schedule.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace smart_infinity {
namespace {

const char* name_of(Work work) {
    switch (work) {
        case Work::kRead:
            return "read";
        case Work::kFetch:
            return "fetch";
        case Work::kCompute:
            return "compute";
        case Work::kWrite:
            return "write";
        case Work::kDeliver:
            break;
    }
    return "deliver";
}

Work work_named(const std::string& name) {
    for (const Work work : {Work::kRead, Work::kFetch, Work::kCompute, Work::kWrite, Work::kDeliver}) {
        if (name == name_of(work)) return work;
    }
    throw std::invalid_argument("TransferSchedule: unknown action " + name);
}

}  // namespace

void bind_schedule(nb::module_& m) {
    using NamedAction = std::tuple<std::string, std::size_t, std::size_t>;
    nb::class_<TransferSchedule>(m, "TransferSchedule",
                                 "The order of a batch as a pure state machine: no I/O, no clock, no threads.")
        .def(
            "__init__",
            [](TransferSchedule* self, std::size_t num_tasklets, std::size_t num_buffers, bool reads, bool writes,
               bool fetches, bool delivers) {
                new (self) TransferSchedule(num_tasklets, num_buffers, {reads, writes, fetches, delivers});
            },
            "num_tasklets"_a, "num_buffers"_a, nb::kw_only(), "reads"_a, "writes"_a, "fetches"_a = false,
            "delivers"_a = false)
        .def(
            "next",
            [](TransferSchedule& self) {
                std::vector<NamedAction> actions;
                while (const auto action = self.next()) {
                    actions.emplace_back(name_of(action->work), action->tasklet, action->buffer);
                }
                return actions;
            },
            "Return the actions to start now, in order, as (name, tasklet, buffer). Names are \"read\", \"fetch\"\n"
            "(parameters from a device), \"compute\", \"write\" and \"deliver\" (parameters to a device).")
        .def("extend", nb::overload_cast<std::size_t>(&TransferSchedule::extend), "num_tasklets"_a, "Append tasklets.")
        .def("prefer", &TransferSchedule::prefer, "tasklets"_a,
             "Move these tasklets, in this order, ahead of the others that have not started.")
        .def(
            "done",
            [](TransferSchedule& self, const std::string& action, std::size_t tasklet) {
                self.done(work_named(action), tasklet);
            },
            "action"_a, "tasklet"_a,
            "Record that a started action has ended.\n\nRaises:\n    ValueError: It is not in flight.")
        .def(
            "fail",
            [](TransferSchedule& self, const std::string& action, std::size_t tasklet) {
                self.fail(work_named(action), tasklet);
            },
            "action"_a, "tasklet"_a,
            "Record that a started action has failed: nothing new starts except deliveries, whose copies began with\n"
            "compute; other actions still report done.")
        .def("parameters_out", &TransferSchedule::parameters_out, "tasklet"_a,
             "Return whether the tasklet has been computed.")
        .def("complete", &TransferSchedule::complete,
             "Return, by tasklet, whether all of its actions have ended without failure.")
        .def_prop_ro("finished", &TransferSchedule::finished);
}

}  // namespace smart_infinity
