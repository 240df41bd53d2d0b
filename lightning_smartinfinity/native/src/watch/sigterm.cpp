#include "watch/sigterm.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <list>
#include <mutex>

namespace smart_infinity {
namespace {

// A signal handler can only access globals.
std::atomic<int> event{-1};
std::atomic<bool> came{false};
std::atomic<bool> alone{false};
std::atomic<const struct sigaction*> before{nullptr};

void on_sigterm(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    came = true;
    const std::uint64_t one = 1;
    // If this fails, the counter is full, and the listener is awake.
    [[maybe_unused]] const ssize_t written = ::write(event, &one, sizeof one);
    errno = error;
    const struct sigaction& earlier = *before;
    if (earlier.sa_flags & SA_SIGINFO) {
        earlier.sa_sigaction(signal, info, context);
    } else if (earlier.sa_handler != SIG_DFL && earlier.sa_handler != SIG_IGN) {
        earlier.sa_handler(signal);
    }
}

bool is_ours(const struct sigaction& action) {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_sigterm;
}

void put_back() {
    struct sigaction present;
    if (::sigaction(SIGTERM, nullptr, &present) == 0 && is_ours(present)) ::sigaction(SIGTERM, before, nullptr);
}

}  // namespace

SigtermListener::SigtermListener(int event_descriptor) {
    static std::once_flag once;
    // A forked child, such as a DataLoader worker, ends on SIGTERM as it would without the listener.
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, put_back); });
    came = false;
    event = event_descriptor;
}

SigtermListener::~SigtermListener() {
    put_back();
    event = -1;
}

void SigtermListener::step_in_front() {
    // A handler may run with any of these at any time, so they are never freed. A process creates only a few.
    static std::mutex mutex;
    static auto* const earlier = new std::list<struct sigaction>;
    const std::lock_guard lock(mutex);
    struct sigaction present;
    if (::sigaction(SIGTERM, nullptr, &present) != 0 || is_ours(present)) return;
    const bool plain = !(present.sa_flags & SA_SIGINFO);
    if (plain && present.sa_handler == SIG_IGN) return;
    before = &earlier->emplace_back(present);
    alone = plain && present.sa_handler == SIG_DFL;
    struct sigaction ours = present;
    ours.sa_flags |= SA_SIGINFO;
    ours.sa_sigaction = on_sigterm;
    ::sigaction(SIGTERM, &ours, nullptr);
}

bool SigtermListener::heard() { return came; }

void SigtermListener::forget() { came = false; }

bool SigtermListener::is_alone() { return alone; }

void end_by_sigterm() {
    ::signal(SIGTERM, SIG_DFL);
    ::kill(::getpid(), SIGTERM);
}

}  // namespace smart_infinity
