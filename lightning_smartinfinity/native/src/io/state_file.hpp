#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace smart_infinity {

class IoScheduler;

enum class Access { kBuffered, kDirect };

// An open file. Its copies share one descriptor, which is closed with the last copy: if a file is closed during a
// transfer, no other file can get the descriptor's number.
class StateFile {
 public:
    // Opens an existing file; throws SystemError. Transfers of its bytes wait for their turn at the scheduler, if any.
    StateFile(std::string path, Access access, std::shared_ptr<IoScheduler> scheduler = nullptr);
    // Takes ownership of a descriptor that is open for reading and writing, with O_DIRECT for kDirect.
    StateFile(std::string path, Access access, int descriptor, std::shared_ptr<IoScheduler> scheduler = nullptr);

    const std::string& path() const { return path_; }
    Access access() const { return access_; }
    IoScheduler* scheduler() const { return scheduler_.get(); }
    int descriptor() const;                           // throws std::runtime_error if closed
    std::uint64_t device() const { return device_; }  // number of the device that holds its file system
    void sync() const;                                // fdatasync
    void close() { open_.reset(); }

 private:
    class Open;

    std::string path_;
    Access access_;
    std::shared_ptr<const Open> open_;
    std::shared_ptr<IoScheduler> scheduler_;
    std::uint64_t device_ = 0;  // asked when the file is opened, which has a limit, as later calls may not have
};

// Returns the NUMA node to which the devices of all these files are attached, if there are several nodes.
std::optional<int> node_of(const std::vector<StateFile>& files);

}  // namespace smart_infinity
