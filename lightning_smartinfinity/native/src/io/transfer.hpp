#pragma once

#include <cstddef>

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

}  // namespace smart_infinity
