#pragma once

#include <string>
#include <system_error>

namespace smart_infinity {

// A failed system call; becomes Python's OSError(errno, message, filename).
class SystemError : public std::system_error {
 public:
    SystemError(int error, const std::string& call, std::string path = {})
        : std::system_error(error, std::generic_category(), call), path_(std::move(path)) {}

    const std::string& path() const { return path_; }

 private:
    std::string path_;
};

}  // namespace smart_infinity
