#pragma once

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "io/io_engine.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

// One engine for each device that holds some files: one thread does not submit to all of them, and a slow device does
// not delay the others. Requests of other files go to the first engine.
class DeviceEngines final : public IoEngine {
 public:
    using Make = std::function<std::unique_ptr<IoEngine>(const std::vector<StateFile>& files)>;

    // `make` is called with the files of each device, but at least once.
    DeviceEngines(const std::vector<StateFile>& files, const Make& make);
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override;
    IoEngineKind kind() const override { return engines_.front()->kind(); }

 private:
    std::vector<std::unique_ptr<IoEngine>> engines_;
    std::unordered_map<int, IoEngine*> by_descriptor_;
};

}  // namespace smart_infinity
