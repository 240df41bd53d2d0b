// What nobody read: names of the streams of this thread's simulated kernels that were not empty when the kernel ended.
#pragma once

#include <string>

namespace sim {

inline std::string& leftovers() {
    thread_local std::string names;
    return names;
}

inline void note_leftover(const char* stream) { leftovers() += std::string(leftovers().empty() ? "" : ", ") + stream; }

}  // namespace sim
