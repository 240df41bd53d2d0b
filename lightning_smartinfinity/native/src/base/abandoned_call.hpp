#pragma once

#include <cstddef>
#include <memory>

namespace smart_infinity {

// Exists until an abandoned call returns. While one exists, the process exits without static destructors: XRT's would
// abort it, and others may wait for a disk.
class AbandonedCall {
 public:
    AbandonedCall();
    ~AbandonedCall();
    AbandonedCall(const AbandonedCall&) = delete;
    AbandonedCall& operator=(const AbandonedCall&) = delete;
};

// Returns how many abandoned calls have not returned, in the whole process.
std::size_t num_abandoned_calls();

// Keeps an object that abandoned calls use for ever, because their return cannot be awaited. From then on the process
// exits without static destructors.
void keep_for_ever(std::shared_ptr<void> used);

}  // namespace smart_infinity
