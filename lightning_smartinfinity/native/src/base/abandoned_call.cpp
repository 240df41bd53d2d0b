#include "base/abandoned_call.hpp"

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

std::atomic<std::size_t> num_abandoned = 0;  // in the whole process

// XRT's own static destructors close what is open, and abort the process over a kernel with an abandoned run.
// Registered after them, this comes before them, when Python has ended.
void leave_before_xrt(int status, void*) {
    if (num_abandoned == 0) return;
    (void)std::fflush(nullptr);
    ::_exit(status);
}

}  // namespace

AbandonedCall::AbandonedCall() {
    static const int registered = ::on_exit(leave_before_xrt, nullptr);
    (void)registered;
    ++num_abandoned;
}

AbandonedCall::~AbandonedCall() { --num_abandoned; }

void keep_for_ever(std::shared_ptr<void> used) {
    static std::mutex mutex;
    // Nobody closes what is used, even when every call has returned.
    static auto* const kept = new std::vector<std::pair<std::shared_ptr<void>, std::unique_ptr<AbandonedCall>>>;
    const std::lock_guard lock(mutex);
    kept->emplace_back(std::move(used), std::make_unique<AbandonedCall>());
}

}  // namespace smart_infinity
