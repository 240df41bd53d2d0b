#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/worker_pool.hpp"
#include "buffers.hpp"
#include "compute_unit.hpp"

namespace smart_infinity::emulator {

// A start of a kernel. The registers are copied at submission, since XRT may reuse the packet.
struct Run {
    std::int64_t number;
    std::weak_ptr<Buffer> packet;
    std::vector<std::uint32_t> registers;
};

// A kernel on the card, with a thread of its own that flushes subnormals as the card's operators do.
class ComputeUnit {
 public:
    using Execute = std::function<void(const ComputeUnit& unit, const Run& run)>;

    // name: "<kernel>:<instance>", as in the xclbin.
    // Throws SystemError if the library of kernels lacks the kernel.
    ComputeUnit(const std::string& name, Execute execute);
    ~ComputeUnit() { stopped_ = true; }
    ComputeUnit(const ComputeUnit&) = delete;
    ComputeUnit& operator=(const ComputeUnit&) = delete;

    const std::string& name() const { return name_; }
    void submit(const Run& run);
    std::size_t num_waiting() const { return num_waiting_; }
    void compute(const Run& run, DeviceMemory& memory) const;

 private:
    void begin(const Run& run);

    const std::string name_;
    RunComputeUnit* const kernel_;
    const Execute execute_;
    std::atomic<std::size_t> num_waiting_ = 0;
    std::atomic<bool> stopped_ = false;  // runs that wait at the end do not begin
    WorkerPool<Run> thread_;             // last, because it uses the other members
};

}  // namespace smart_infinity::emulator
