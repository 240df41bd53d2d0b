#pragma once

#include <memory>
#include <string>

namespace smart_infinity {

enum class Access { kBuffered, kDirect };

// One open descriptor, shared by its copies and closed with the last of them: closing a file in the middle of a
// transfer cannot hand its number to somebody else's file.
class StateFile {
 public:
    // Opens an existing file; throws SystemError.
    StateFile(std::string path, Access access);

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
