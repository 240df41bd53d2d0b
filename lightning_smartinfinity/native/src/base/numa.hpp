#pragma once

#include <sched.h>

#include <cstdint>
#include <optional>
#include <string>

namespace smart_infinity {

// The folder that the kernel mounts at /sys. Tests choose another one.
std::string& system_folder();

// Returns the NUMA node to which a block device is attached, by the number that stat() reports for its files. Returns
// nothing if the machine has one node only, or the node is unknown. That of a RAID is the one that all its drives have.
std::optional<int> node_of_device(std::uint64_t device);

// Keeps this thread, and the threads that it starts, on the CPUs of a node while this object exists. The started
// threads stay there, and the memory that they touch first is that node's. It does nothing without a node, or if the
// thread may use no CPU of that node.
class OnNode {
 public:
    explicit OnNode(std::optional<int> node);
    ~OnNode();
    OnNode(const OnNode&) = delete;
    OnNode& operator=(const OnNode&) = delete;

 private:
    std::optional<cpu_set_t> before_;
};

}  // namespace smart_infinity
