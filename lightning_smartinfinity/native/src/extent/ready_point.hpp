#pragma once

namespace smart_infinity {

// A point in time that must be reached before a tasklet is computed: work of a device, or gradients on their way.
class ReadyPoint {
 public:
    ReadyPoint() = default;
    virtual ~ReadyPoint() = default;
    ReadyPoint(const ReadyPoint&) = delete;
    ReadyPoint& operator=(const ReadyPoint&) = delete;

    // Waits until the point is reached. Throws CudaError if the work before it failed.
    virtual void synchronize() const = 0;
};

}  // namespace smart_infinity
