#include "io/uring_ring.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

int make_event(unsigned value) {
    const int descriptor = ::eventfd(value, EFD_CLOEXEC);
    if (descriptor < 0) throw SystemError(errno, "io_uring: eventfd");
    return descriptor;
}

// Returns an errno or 0. Newer kernels take less CPU time if only one thread submits and reaps. Older ones refuse these
// flags.
int set_up(io_uring& ring, unsigned num_entries) {
    const unsigned flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    const int result = io_uring_queue_init(num_entries, &ring, flags);
    return result == -EINVAL ? -io_uring_queue_init(num_entries, &ring, 0) : -result;
}

}  // namespace

EventDescriptor::EventDescriptor(unsigned value) : descriptor_(make_event(value)) {}

EventDescriptor::~EventDescriptor() { ::close(descriptor_); }

UringRing::UringRing(unsigned num_entries) {
    const int error = set_up(ring_, num_entries);
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

}  // namespace smart_infinity
