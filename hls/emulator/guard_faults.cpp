#include "guard_faults.hpp"

#include <signal.h>
#include <sys/mman.h>

#include <array>
#include <mutex>
#include <stdexcept>

#include "mapping.hpp"

namespace smart_infinity::emulator {
namespace {

// The signal handler reads it, so it consists of lock-free atomics only.
struct GuardedRange {
    std::atomic<bool> taken = false;
    std::atomic<std::uintptr_t> begin = 0;
    std::atomic<std::uintptr_t> end = 0;
    std::atomic<std::uintptr_t> first_fault = 0;
};

constexpr std::size_t kNumRanges = 256;
std::array<GuardedRange, kNumRanges> ranges;
struct sigaction previous;

bool let_through(std::uintptr_t address) {
    for (GuardedRange& guarded : ranges) {
        if (address < guarded.begin.load() || address >= guarded.end.load()) continue;
        std::uintptr_t none = 0;
        guarded.first_fault.compare_exchange_strong(none, address);
        void* page = reinterpret_cast<void*>(address / kPageBytes * kPageBytes);
        return mprotect(page, kPageBytes, PROT_READ | PROT_WRITE) == 0;
    }
    return false;
}

void on_fault(int signal, siginfo_t* info, void* /*context*/) {
    if (let_through(reinterpret_cast<std::uintptr_t>(info->si_addr))) return;
    sigaction(signal, &previous, nullptr);  // the access is repeated and then goes to the previous handler
}

// Installs it again if others have put their handler in front since the last run.
void install_handler() {
    static std::mutex mutex;
    const std::scoped_lock lock(mutex);
    struct sigaction current{};
    sigaction(SIGSEGV, nullptr, &current);
    if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == on_fault) return;
    previous = current;
    struct sigaction ours{};
    ours.sa_sigaction = on_fault;
    ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
    sigaction(SIGSEGV, &ours, nullptr);
}

std::size_t take_range() {
    for (std::size_t index = 0; index < kNumRanges; ++index) {
        if (!ranges[index].taken.exchange(true)) return index;
    }
    throw std::runtime_error("too many runs at a time");
}

}  // namespace

GuardedAddresses::GuardedAddresses(const void* begin, std::uint64_t bytes) : index_(take_range()) {
    install_handler();
    GuardedRange& guarded = ranges[index_];
    guarded.first_fault = 0;
    guarded.begin = reinterpret_cast<std::uintptr_t>(begin);
    guarded.end = guarded.begin + bytes;
}

GuardedAddresses::~GuardedAddresses() {
    GuardedRange& guarded = ranges[index_];
    guarded.end = 0;
    guarded.begin = 0;
    guarded.taken = false;
}

std::uintptr_t GuardedAddresses::first_fault() const { return ranges[index_].first_fault; }

}  // namespace smart_infinity::emulator
