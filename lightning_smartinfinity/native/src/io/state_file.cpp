#include "io/state_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <stdexcept>

#include "base/numa.hpp"
#include "base/system_error.hpp"

namespace smart_infinity {

class StateFile::Open {
 public:
    explicit Open(int descriptor) : descriptor(descriptor) {}
    // Errors of close() can be ignored: all data that must be on storage has been synced, and sync() reports errors.
    ~Open() { ::close(descriptor); }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

    const int descriptor;
};

namespace {

int open_descriptor(const std::string& path, Access access) {
    const int flags = O_RDWR | O_CLOEXEC | (access == Access::kDirect ? O_DIRECT : 0);
    for (;;) {
        const int descriptor = ::open(path.c_str(), flags);
        if (descriptor >= 0) return descriptor;
        if (errno != EINTR) throw SystemError(errno, "StateFile: open", path);
    }
}

}  // namespace

StateFile::StateFile(std::string path, Access access, std::shared_ptr<IoScheduler> scheduler)
    : StateFile(path, access, open_descriptor(path, access), std::move(scheduler)) {}

StateFile::StateFile(std::string path, Access access, int descriptor, std::shared_ptr<IoScheduler> scheduler)
    : path_(std::move(path)),
      access_(access),
      open_(std::make_shared<Open>(descriptor)),
      scheduler_(std::move(scheduler)) {
    struct stat status{};
    if (::fstat(descriptor, &status) != 0) throw SystemError(errno, "StateFile: fstat", path_);
    device_ = status.st_dev;
}

int StateFile::descriptor() const {
    if (!open_) throw std::runtime_error("StateFile: " + path_ + " is closed");
    return open_->descriptor;
}

std::optional<int> node_of(const std::vector<StateFile>& files) {
    std::optional<int> node;
    for (const StateFile& file : files) {
        const std::optional<int> found = node_of_device(file.device());
        if (!found || (node && *node != *found)) return std::nullopt;
        node = found;
    }
    return node;
}

void StateFile::sync() const {
    while (::fdatasync(descriptor()) != 0) {
        if (errno != EINTR) throw SystemError(errno, "StateFile: fdatasync", path_);
    }
}

}  // namespace smart_infinity
