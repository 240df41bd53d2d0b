#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "extent/trailer.hpp"
#include "io/io_engine.hpp"
#include "io/state_file.hpp"
#include "pipeline/resident_tasklets.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

constexpr std::size_t kMaxBuffers = 4096;

struct PipelineOptions {
    std::vector<StateFile> files;
    Identity identity;
    std::size_t num_buffers;
    std::size_t buffer_bytes;
    std::size_t io_threads = 4;
    std::size_t compute_threads = 1;
    std::optional<IoEngineKind> io_engine = std::nullopt;  // none: the fastest engine that works here
    ResidentOptions resident = {};
    // Creates the updater after the options have been checked; null: the host updates.
    std::function<std::unique_ptr<Updater>(const PipelineOptions&)> make_updater = nullptr;
    std::optional<std::chrono::milliseconds> timeout = std::nullopt;  // longest time of a transfer; none: unlimited
};

// Returns the options. Throws std::invalid_argument if they are invalid.
PipelineOptions checked(PipelineOptions options);

}  // namespace smart_infinity
