#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

namespace smart_infinity {

enum class IoEngineKind {
    kUring,        // io_uring, with registered files and, below the limit on locked memory, buffers
    kUringPolled,  // the same, and a thread of the kernel that polls for requests
    kThreads,      // blocking calls in threads
    kPlain,        // the same, for files that go through the page cache: it is told what will not be used again
};

enum class Direction { kRead, kWrite };

// One attempt at a transfer between memory and a file.
struct IoRequest {
    Direction direction;
    int descriptor;
    std::uint64_t offset;
    std::byte* data;
    std::size_t bytes;
    std::size_t tag;  // the submitter's
};

// In place of what was transferred: it has not returned, and was given up.
constexpr std::int64_t kNotReturned = std::numeric_limits<std::int64_t>::min();

// What became of it: fewer bytes than asked for are no error, and the submitter goes on from there.
struct IoResult {
    std::int64_t transferred;  // bytes, a negative errno, or kNotReturned
    double seconds;            // in the system
};

class CompletionHandler {
 public:
    // Called once per request, from any thread but never from within submit().
    virtual void completed(const IoRequest& request, const IoResult& result) = 0;

 protected:
    ~CompletionHandler() = default;
};

// What an engine has cost since its creation.
struct IoUsage {
    std::uint64_t system_calls = 0;
    double cpu_seconds = 0;              // of its own threads
    std::uint64_t registered_bytes = 0;  // of memory that the kernel holds pinned for it
    int registration_errno = 0;          // why it holds none, where the engine asked for it
};

class IoEngine {
 public:
    IoEngine() = default;
    IoEngine(const IoEngine&) = delete;
    IoEngine& operator=(const IoEngine&) = delete;
    virtual ~IoEngine() = default;  // after every completion of what was submitted

    // Returns at once. Requests start in the order of submission and complete in any.
    virtual void submit(const IoRequest& request, CompletionHandler& handler) = 0;

    virtual IoUsage usage() const = 0;

    virtual IoEngineKind kind() const = 0;
};

}  // namespace smart_infinity
