#pragma once

#include <liburing.h>

namespace smart_infinity {

// An event of the kernel, closed with this object.
class EventDescriptor {
 public:
    // Throws SystemError.
    explicit EventDescriptor(unsigned value);
    ~EventDescriptor();
    EventDescriptor(const EventDescriptor&) = delete;
    EventDescriptor& operator=(const EventDescriptor&) = delete;
    int get() const { return descriptor_; }

 private:
    const int descriptor_;
};

// The kernel's ring. Its descriptor is close-on-exec, and a forked child does not get its memory.
class UringRing {
 public:
    // Throws SystemError. With `polled`, a thread of the kernel polls for requests.
    UringRing(unsigned num_entries, bool polled);
    ~UringRing() { io_uring_queue_exit(&ring_); }
    UringRing(const UringRing&) = delete;
    UringRing& operator=(const UringRing&) = delete;
    io_uring* get() { return &ring_; }

    // Reads through it: a filter may forbid only to enter a ring, and an old kernel not know the operations. Throws
    // SystemError.
    void try_out();

 private:
    int set_up(unsigned num_entries, bool polled);

    io_uring ring_{};
};

}  // namespace smart_infinity
