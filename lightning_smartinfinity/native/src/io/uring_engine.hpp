#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/io_engines.hpp"

namespace smart_infinity {

// Returns why io_uring is unavailable in this build or process, or nothing if it is available.
std::optional<std::string> uring_unavailable();

// Makes an engine with one ring and one thread, the only one that submits to the ring and reaps it. Files and memory
// are registered with the ring, so that the kernel looks up and pins nothing per request. If the memory exceeds the
// limit on locked memory, none of it is registered: requests then take more CPU time, and usage() reports why. Throws
// SystemError.
std::unique_ptr<IoEngine> make_uring_engine(const std::vector<StateFile>& files, const MemoryRange& memory);

}  // namespace smart_infinity
