#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/io_engine.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

constexpr IoEngineKind kIoEngineKinds[] = {IoEngineKind::kUring, IoEngineKind::kUringPolled, IoEngineKind::kThreads,
                                           IoEngineKind::kPlain};

const char* name_of(IoEngineKind kind);
IoEngineKind io_engine_named(const std::string& name);  // throws std::invalid_argument

// Why this process cannot have such an engine, if it cannot: a build without liburing, a container that forbids
// io_uring, an old kernel.
std::optional<std::string> unavailable(IoEngineKind kind);

// Memory that requests will name, registered where the engine gains by it, in parts that no request straddles.
struct MemoryRange {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t part_bytes = 0;
};

struct IoOptions {
    // None: the fastest that works here for these files.
    std::optional<IoEngineKind> kind;
    std::size_t threads = 4;  // of an engine that has them
    std::vector<StateFile> files;
    MemoryRange memory;
};

// Throws std::invalid_argument for a number of threads out of range, SystemError for an engine that was asked for and
// is not to be had.
std::unique_ptr<IoEngine> make_io_engine(const IoOptions& options);

}  // namespace smart_infinity
