#include "io/uring_ring.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

constexpr unsigned kPollIdleMilliseconds = 50;

int make_event(unsigned value) {
    const int descriptor = ::eventfd(value, EFD_CLOEXEC);
    if (descriptor < 0) throw SystemError(errno, "io_uring: eventfd");
    return descriptor;
}

}  // namespace

EventDescriptor::EventDescriptor(unsigned value) : descriptor_(make_event(value)) {}

EventDescriptor::~EventDescriptor() { ::close(descriptor_); }

UringRing::UringRing(unsigned num_entries, bool polled) {
    const int error = set_up(num_entries, polled);
    if (error != 0) throw SystemError(error, "io_uring: io_uring_setup");
    (void)io_uring_ring_dontfork(&ring_);  // a forked child has no use for the ring
}

void UringRing::probe() {
    const EventDescriptor event(1);
    std::uint64_t value = 0;
    io_uring_prep_read(io_uring_get_sqe(&ring_), event.get(), &value, sizeof value, 0);
    int result = -EINTR;
    while (result == -EINTR) result = io_uring_submit_and_wait(&ring_, 1);
    if (result < 0) throw SystemError(-result, "io_uring: io_uring_enter");
    io_uring_cqe* completion = nullptr;
    do {
        result = io_uring_wait_cqe(&ring_, &completion);
    } while (result == -EINTR);
    if (result < 0) throw SystemError(-result, "io_uring: io_uring_enter");
    const int read = completion->res;
    io_uring_cqe_seen(&ring_, completion);
    if (read < 0) throw SystemError(-read, "io_uring: IORING_OP_READ");
}

// Newer kernels take less CPU time if only one thread submits and reaps. Older ones refuse these flags.
int UringRing::set_up(unsigned num_entries, bool polled) {
    io_uring_params parameters{};
    parameters.flags = IORING_SETUP_SINGLE_ISSUER | (polled ? IORING_SETUP_SQPOLL : IORING_SETUP_DEFER_TASKRUN);
    parameters.sq_thread_idle = kPollIdleMilliseconds;
    const int first = io_uring_queue_init_params(num_entries, &ring_, &parameters);
    if (first != -EINVAL) return -first;
    parameters = {};
    parameters.flags = polled ? IORING_SETUP_SQPOLL : 0;
    parameters.sq_thread_idle = kPollIdleMilliseconds;
    return -io_uring_queue_init_params(num_entries, &ring_, &parameters);
}

}  // namespace smart_infinity
