#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "io/io_engines.hpp"

namespace smart_infinity {

// Why there is no io_uring in this build or process, if there is none.
std::optional<std::string> uring_unavailable(bool polled);

// One ring of the kernel's, and one thread that alone submits to it and reaps it. Files and memory are registered with
// it: the kernel then looks up and pins nothing per request. Memory that does not fit below the limit on locked memory
// stays unregistered as a whole, works the same for more CPU time, and usage() says why. Throws SystemError.
std::unique_ptr<IoEngine> make_uring_engine(const std::vector<StateFile>& files, const MemoryRange& memory,
                                            bool polled);

}  // namespace smart_infinity
