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

// In the whole process. Kept objects stay counted after every call has returned.
std::atomic<std::size_t> num_abandoned = 0;
std::atomic<std::size_t> num_kept = 0;

// XRT's static destructors close every open kernel and abort the process if one has an abandoned run, and others may
// wait for a disk. This function is registered after them and so runs before them, once Python has ended. Flushing all
// files could wait for a disk, too.
void exit_before_destructors(int status, void*) {
    if (num_abandoned + num_kept == 0) return;
    (void)std::fflush(stdout);
    (void)std::fflush(stderr);
    ::_exit(status);
}

void register_exit() {
    static const int registered = ::on_exit(exit_before_destructors, nullptr);
    (void)registered;
}

}  // namespace

AbandonedCall::AbandonedCall() {
    register_exit();
    ++num_abandoned;
}

AbandonedCall::~AbandonedCall() { --num_abandoned; }

std::size_t num_abandoned_calls() { return num_abandoned; }

void keep_for_ever(std::shared_ptr<void> used) {
    static std::mutex mutex;
    static auto* const kept = new std::vector<std::shared_ptr<void>>;  // never closed
    const std::lock_guard lock(mutex);
    register_exit();
    kept->push_back(std::move(used));
    ++num_kept;
}

}  // namespace smart_infinity
