#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

namespace smart_infinity {

// The process that created an object. Threads and MADV_DONTFORK mappings do not exist in a forked child, so objects
// that own them must be neither used nor destroyed there.
class Process {
 public:
    Process();
    bool is_current() const;
    // Throws std::runtime_error in a forked child.
    void require_current(const std::string& owner) const;

 private:
    pid_t pid_;
};

}  // namespace smart_infinity
