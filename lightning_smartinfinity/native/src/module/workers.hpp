#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "card/card_binding.hpp"
#include "io/file_queue.hpp"
#include "io/io_engines.hpp"
#include "module/closable.hpp"
#include "pipeline/device_traffic.hpp"
#include "pipeline/pipeline.hpp"
#include "tensor/tensor_store.hpp"

namespace smart_infinity {

using PythonPipeline = Closable<Pipeline>;
using PythonFileQueue = Closable<FileQueue>;
using PythonTensorStore = Closable<TensorStore>;

// Memory on a card, and its address in this process.
struct PythonCardBuffer {
    std::shared_ptr<CardBuffer> buffer;
    std::size_t bytes;
    std::byte* data;
};

// Counters of a pipeline or of a queue; the latter has no device traffic.
struct PythonCounters : Counters, DeviceTraffic {};

// Makes Ctrl-C end a wait, and asks the process to end. Python runs signal handlers in the main thread only; in other
// threads this does nothing.
void check_signals();

// Returns a limit in milliseconds. Throws std::invalid_argument below 1.
std::optional<std::chrono::milliseconds> timeout_of(std::optional<std::int64_t> timeout_ms);

// Returns nothing for "auto", which selects the fastest engine that works here.
std::optional<IoEngineKind> io_engine_of(const std::string& name);

}  // namespace smart_infinity
