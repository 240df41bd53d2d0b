#include "base/still_out.hpp"

#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <utility>
#include <vector>

namespace smart_infinity {
namespace {

std::atomic<std::size_t> num_still_out = 0;  // in the whole process

// XRT's own static destructors close what is open, and abort the process over a kernel with a run that is still out.
// Registered after them, this comes before them, when Python has ended.
void leave_before_xrt(int status, void*) {
    if (num_still_out == 0) return;
    (void)std::fflush(nullptr);
    ::_exit(status);
}

}  // namespace

StillOut::StillOut() {
    static const int registered = ::on_exit(leave_before_xrt, nullptr);
    (void)registered;
    ++num_still_out;
}

StillOut::~StillOut() { --num_still_out; }

void keep_for_ever(std::shared_ptr<void> used) {
    static std::mutex mutex;
    // Even when all has returned nobody closes what is used.
    static auto* const kept = new std::vector<std::pair<std::shared_ptr<void>, std::unique_ptr<StillOut>>>;
    const std::lock_guard lock(mutex);
    kept->emplace_back(std::move(used), std::make_unique<StillOut>());
}

}  // namespace smart_infinity
