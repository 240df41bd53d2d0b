#include "module/workers.hpp"

#include <stdexcept>

#include "base/ending.hpp"

namespace nb = nanobind;

namespace smart_infinity {

void check_signals() {
    const nb::gil_scoped_acquire acquire;
    if (PyErr_CheckSignals() == 0) return;
    ask_to_end();
    throw nb::python_error();
}

std::optional<std::chrono::milliseconds> timeout_of(std::optional<std::int64_t> timeout_ms) {
    if (!timeout_ms) return std::nullopt;
    if (*timeout_ms < 1) throw std::invalid_argument("timeout_ms must be at least 1");
    return std::chrono::milliseconds(*timeout_ms);
}

std::optional<IoEngineKind> io_engine_of(const std::string& name) {
    if (name == "auto") return std::nullopt;
    return io_engine_named(name);
}

}  // namespace smart_infinity
