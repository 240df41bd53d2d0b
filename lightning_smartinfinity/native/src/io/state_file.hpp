#pragma once

#include <memory>
#include <string>

namespace smart_infinity {

enum class Access { kBuffered, kDirect };

// An open file. Its copies share one descriptor, which is closed with the last of them: if a file is closed during a
// transfer, no other file can get the descriptor's number.
class StateFile {
 public:
    // Opens an existing file; throws SystemError.
    StateFile(std::string path, Access access);
    // Takes over a descriptor, which is open for reading and writing, with O_DIRECT for kDirect.
    StateFile(std::string path, Access access, int descriptor);

    const std::string& path() const { return path_; }
    Access access() const { return access_; }
    int descriptor() const;  // throws std::runtime_error if closed
    void sync() const;       // fdatasync
    void close() { open_.reset(); }

 private:
    class Open;

    std::string path_;
    Access access_;
    std::shared_ptr<const Open> open_;
};

}  // namespace smart_infinity
