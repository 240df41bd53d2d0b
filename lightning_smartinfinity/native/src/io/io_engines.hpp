#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/io_engine.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

constexpr IoEngineKind kIoEngineKinds[] = {IoEngineKind::kUring, IoEngineKind::kThreads, IoEngineKind::kPlain};

const char* name_of(IoEngineKind kind);
IoEngineKind io_engine_named(const std::string& name);  // throws std::invalid_argument

// Returns why this process cannot use such an engine (a build without liburing, a container that forbids io_uring, an
// old kernel), or nothing if it can.
std::optional<std::string> unavailable(IoEngineKind kind);

// Memory that requests will use, registered with engines that benefit from it. It is registered in parts of
// `part_bytes`; no request should span two parts.
struct MemoryRange {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t part_bytes = 0;
};

struct IoOptions {
    // The engine to use; none: the fastest available one for these files.
    std::optional<IoEngineKind> kind;
    std::size_t threads = 4;       // for engines that use threads
    std::vector<StateFile> files;  // registered with engines that benefit from it
    MemoryRange memory;
    std::vector<StateFile> unregistered = {};  // other files that requests will use
};

// Throws std::invalid_argument if the number of threads is out of range, SystemError if the requested engine is
// unavailable.
std::unique_ptr<IoEngine> make_io_engine(const IoOptions& options);

}  // namespace smart_infinity
