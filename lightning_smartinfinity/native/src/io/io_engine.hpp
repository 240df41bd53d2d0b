#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace smart_infinity {

// The largest io_threads, and the largest compute_threads.
constexpr std::size_t kMaxThreads = 1024;

enum class IoEngineKind {
    kUring,    // io_uring with registered files and, if the limit on locked memory allows, buffers
    kThreads,  // blocking calls in threads
    kPlain,    // the same, and advises the page cache to write out and drop what was transferred
};

enum class Direction { kRead, kWrite };

// One attempt at a transfer between memory and a file.
struct IoRequest {
    Direction direction;
    int descriptor;
    std::uint64_t offset;
    std::byte* data;
    std::size_t bytes;
    std::size_t tag;  // chosen by the submitter
    // Start of its time limit if it has waited for its turn; default: the start of this attempt.
    std::chrono::steady_clock::time_point since{};
};

// Replaces the number of transferred bytes if the request was abandoned because it did not return in time.
constexpr std::int64_t kNotReturned = std::numeric_limits<std::int64_t>::min();

// The result of an attempt. Fewer bytes than requested are not an error: the submitter then requests the rest.
struct IoResult {
    std::int64_t transferred;  // bytes, a negative errno, or kNotReturned
    double seconds;            // from the start of the attempt to its end
};

class CompletionHandler {
 public:
    // Called once per request, from any thread but never from within submit().
    virtual void completed(const IoRequest& request, const IoResult& result) = 0;

 protected:
    ~CompletionHandler() = default;
};

// Resources that an engine has used since its creation.
struct IoUsage {
    std::uint64_t system_calls = 0;
    double cpu_seconds = 0;              // CPU time of its own threads
    std::uint64_t registered_bytes = 0;  // memory that the kernel keeps pinned for it now
    int registration_errno = 0;          // why none is pinned, if the engine requested it; or 0
};

class IoEngine {
 public:
    IoEngine() = default;
    IoEngine(const IoEngine&) = delete;
    IoEngine& operator=(const IoEngine&) = delete;
    virtual ~IoEngine() = default;  // an engine first waits for all submitted requests

    // Returns at once. Requests start in the order of submission and complete in any order. It does not throw: a failed
    // request is completed with an errno.
    virtual void submit(const IoRequest& request, CompletionHandler& handler) = 0;

    virtual IoUsage usage() const = 0;

    virtual IoEngineKind kind() const = 0;
};

}  // namespace smart_infinity
