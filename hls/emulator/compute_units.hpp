#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

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
    // Throws std::system_error if the library of kernels lacks the kernel.
    ComputeUnit(const std::string& name, Execute execute);
    ~ComputeUnit();
    ComputeUnit(const ComputeUnit&) = delete;
    ComputeUnit& operator=(const ComputeUnit&) = delete;

    const std::string& name() const { return name_; }
    void submit(Run run);
    std::size_t num_waiting() const;
    void compute(const Run& run, DeviceMemory& memory) const;

 private:
    void serve();

    const std::string name_;
    RunComputeUnit* const kernel_;
    const Execute execute_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Run> waiting_;
    bool stopped_ = false;
    std::thread thread_;  // last, because it uses the other members
};

}  // namespace smart_infinity::emulator
