#include "base/process.hpp"

#include <unistd.h>

#include <stdexcept>

namespace smart_infinity {

Process::Process() : pid_(::getpid()) {}

bool Process::is_current() const { return ::getpid() == pid_; }

void Process::require_current(const std::string& owner) const {
    if (is_current()) return;
    throw std::runtime_error(owner + ": made in process " + std::to_string(pid_) +
                             ", it cannot be used in a process forked from it; make another one here");
}

}  // namespace smart_infinity
