#include "io/blocking_transfer.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

#include "base/stopwatch.hpp"

namespace smart_infinity {

IoResult attempt(const IoRequest& request) {
    const Stopwatch stopwatch;
    const auto offset = static_cast<off_t>(request.offset);
    const ssize_t transferred = request.direction == Direction::kRead
                                    ? ::pread(request.descriptor, request.data, request.bytes, offset)
                                    : ::pwrite(request.descriptor, request.data, request.bytes, offset);
    const std::int64_t result = transferred >= 0 ? transferred : -errno;
    return IoResult{result, stopwatch.seconds()};
}

}  // namespace smart_infinity
