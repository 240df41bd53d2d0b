#include "base/numa.hpp"

#include <sys/sysmacros.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>
#include <vector>

namespace smart_infinity {
namespace {

namespace fs = std::filesystem;

// Returns the numbers in a list such as 0-3,8; none if the file cannot be read.
std::vector<int> numbers_in(const fs::path& path) {
    std::vector<int> numbers;
    std::ifstream file(path);
    for (std::string part; std::getline(file, part, ',');) {
        std::istringstream text(part);
        int first = 0;
        if (!(text >> first)) continue;
        int last = first;
        if (text.peek() == '-') text.ignore() >> last;
        for (int number = first; number <= last; ++number) numbers.push_back(number);
    }
    return numbers;
}

fs::path node_folder() { return fs::path(system_folder()) / "devices/system/node"; }

// Returns the node of the nearest device above a block device's folder that has one.
std::optional<int> node_above(fs::path folder) {
    for (; folder.has_relative_path(); folder = folder.parent_path()) {
        int node = -1;
        if (std::ifstream(folder / "numa_node") >> node) return node >= 0 ? std::optional(node) : std::nullopt;
    }
    return std::nullopt;
}

std::vector<fs::path> drives_of(const fs::path& folder) {
    std::error_code error;
    std::vector<fs::path> drives;
    for (const auto& slave : fs::directory_iterator(folder / "slaves", error)) {
        drives.push_back(fs::canonical(slave.path(), error));
    }
    return drives.empty() ? std::vector{folder} : drives;
}

}  // namespace

std::string& system_folder() {
    static std::string folder = "/sys";
    return folder;
}

std::optional<int> node_of_device(std::uint64_t device) {
    if (numbers_in(node_folder() / "online").size() < 2) return std::nullopt;
    const std::string name = std::to_string(major(device)) + ":" + std::to_string(minor(device));
    std::error_code error;
    const fs::path folder = fs::canonical(fs::path(system_folder()) / "dev/block" / name, error);
    if (error) return std::nullopt;
    const std::vector<fs::path> drives = drives_of(folder);
    const std::optional<int> node = node_above(drives.front());
    for (const fs::path& drive : drives) {
        if (node_above(drive) != node) return std::nullopt;
    }
    return node;
}

OnNode::OnNode(std::optional<int> node) {
    cpu_set_t before, chosen;
    if (!node || ::sched_getaffinity(0, sizeof before, &before) != 0) return;
    CPU_ZERO(&chosen);
    for (const int cpu : numbers_in(node_folder() / ("node" + std::to_string(*node)) / "cpulist")) {
        if (cpu >= 0 && cpu < CPU_SETSIZE && CPU_ISSET(cpu, &before)) CPU_SET(cpu, &chosen);
    }
    if (CPU_COUNT(&chosen) > 0 && ::sched_setaffinity(0, sizeof chosen, &chosen) == 0) before_ = before;
}

OnNode::~OnNode() {
    if (before_) (void)::sched_setaffinity(0, sizeof *before_, &*before_);
}

}  // namespace smart_infinity
