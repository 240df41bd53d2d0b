#pragma once

#include <cstddef>
#include <string>

#include "base/failure.hpp"
#include "io/io_engine.hpp"
#include "io/state_file.hpp"

namespace smart_infinity {

// A transfer that is attempted repeatedly until it is complete or has failed.
class Transfer {
 public:
    enum class Progress { kDone, kAgain, kEndOfFile, kError, kNotReturned };

    Transfer() = default;
    Transfer(const IoRequest& whole, Access access) : rest_(whole), access_(access) {}

    // Returns the attempt to submit next.
    const IoRequest& rest() const { return rest_; }

    // Records the result of the last attempt. Returns whether another one is needed, or how the transfer ended.
    Progress advance(const IoResult& result);
    int error() const { return error_; }  // after kError: an errno

 private:
    Progress fail(int error);
    Progress stalled();

    IoRequest rest_{};
    Access access_ = Access::kDirect;
    int stalls_ = 0;
    int error_ = 0;
};

// Returns why a request ended with kNotReturned. Limits of a card (kDevice) are in milliseconds, of a disk in seconds.
std::string not_returned_text(const IoResult& result, FailureKind kind);

}  // namespace smart_infinity
