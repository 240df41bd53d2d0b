#pragma once

#include <liburing.h>

namespace smart_infinity {

// An eventfd, closed by the destructor.
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

// A ring of the kernel. Its descriptor is close-on-exec, and its memory is not mapped in a forked child.
class UringRing {
 public:
    explicit UringRing(unsigned num_entries);  // throws SystemError
    ~UringRing() { io_uring_queue_exit(&ring_); }
    UringRing(const UringRing&) = delete;
    UringRing& operator=(const UringRing&) = delete;
    io_uring* get() { return &ring_; }

    // Makes one read through the ring, since a filter may forbid only entering it, and an old kernel may lack
    // operations. Throws SystemError.
    void probe();

 private:
    io_uring ring_{};
};

}  // namespace smart_infinity
