// Names of this thread's streams that were not empty when their simulated kernel ended.
#pragma once

#include <string>

namespace sim {

inline std::string& leftovers() {
    thread_local std::string names;
    return names;
}

inline void note_leftover(const char* stream) { leftovers() += std::string(leftovers().empty() ? "" : ", ") + stream; }

}  // namespace sim
