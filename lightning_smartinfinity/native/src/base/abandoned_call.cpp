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

// XRT's static destructors close every open kernel and abort the process if one has an abandoned run. This function is
// registered after them and so runs before them, once Python has ended.
void exit_before_xrt(int status, void*) {
    if (num_abandoned == 0) return;
    (void)std::fflush(nullptr);
    ::_exit(status);
}

}  // namespace

AbandonedCall::AbandonedCall() {
    static const int registered = ::on_exit(exit_before_xrt, nullptr);
    (void)registered;
    ++num_abandoned;
}

AbandonedCall::~AbandonedCall() { --num_abandoned; }

void keep_for_ever(std::shared_ptr<void> used) {
    static std::mutex mutex;
    // Kept objects are never closed, even after every call has returned.
    static auto* const kept = new std::vector<std::pair<std::shared_ptr<void>, std::unique_ptr<AbandonedCall>>>;
    const std::lock_guard lock(mutex);
    kept->emplace_back(std::move(used), std::make_unique<AbandonedCall>());
}

}  // namespace smart_infinity
