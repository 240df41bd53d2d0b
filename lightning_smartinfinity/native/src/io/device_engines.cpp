#include "io/device_engines.hpp"

#include <cstdint>
#include <map>
#include <utility>

namespace smart_infinity {

DeviceEngines::DeviceEngines(const std::vector<StateFile>& files, const Make& make) {
    std::map<std::uint64_t, std::vector<StateFile>> by_device;
    for (const StateFile& file : files) by_device[file.device()].push_back(file);
    for (const auto& [device, held] : by_device) {
        engines_.push_back(make(held));
        for (const StateFile& file : held) by_descriptor_[file.descriptor()] = engines_.back().get();
    }
    if (engines_.empty()) engines_.push_back(make({}));
}

void DeviceEngines::submit(const IoRequest& request, CompletionHandler& handler) {
    const auto found = by_descriptor_.find(request.descriptor);
    (found != by_descriptor_.end() ? *found->second : *engines_.front()).submit(request, handler);
}

IoUsage DeviceEngines::usage() const {
    IoUsage sum;
    for (const auto& engine : engines_) {
        const IoUsage usage = engine->usage();
        sum.system_calls += usage.system_calls;
        sum.cpu_seconds += usage.cpu_seconds;
        sum.registered_bytes += usage.registered_bytes;
        if (sum.registration_errno == 0) sum.registration_errno = usage.registration_errno;
    }
    return sum;
}

}  // namespace smart_infinity
