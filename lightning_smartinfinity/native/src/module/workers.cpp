#include "module/workers.hpp"

namespace nb = nanobind;

namespace smart_infinity {

void check_signals() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
}

std::optional<IoEngineKind> io_engine_of(const std::string& name) {
    if (name == "auto") return std::nullopt;
    return io_engine_named(name);
}

}  // namespace smart_infinity
