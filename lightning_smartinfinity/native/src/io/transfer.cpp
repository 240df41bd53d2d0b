#include "io/transfer.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <sstream>

#include "base/buffer.hpp"

namespace smart_infinity {
namespace {

// After this many attempts without progress, the file has ended (perhaps inside a block) or the disk is full. A single
// attempt does not prove it, because a signal can also cut an attempt short.
constexpr int kMaxStalls = 16;

// Returns whether a write would exceed this process's file size limit. The kernel cuts such a write at the limit. If
// the limit is inside a block, direct I/O then fails because of alignment, or makes no progress.
bool beyond_size_limit(const IoRequest& request) {
    rlimit limit{};
    return request.direction == Direction::kWrite && ::getrlimit(RLIMIT_FSIZE, &limit) == 0 &&
           limit.rlim_cur != RLIM_INFINITY && request.offset + request.bytes > limit.rlim_cur;
}

}  // namespace

Transfer::Progress Transfer::advance(const IoResult& result) {
    if (result.transferred == smart_infinity::kNotReturned) return Progress::kNotReturned;
    if (result.transferred == -EINTR) return Progress::kAgain;
    if (result.transferred == -EINVAL && beyond_size_limit(rest_)) return fail(EFBIG);
    if (result.transferred < 0) return fail(static_cast<int>(-result.transferred));
    const auto transferred = static_cast<std::size_t>(result.transferred);
    if (transferred >= rest_.bytes) return Progress::kDone;
    // Direct I/O cannot continue inside a block, so the block is transferred again.
    const std::size_t kept = access_ == Access::kDirect ? transferred / kBlockBytes * kBlockBytes : transferred;
    if (transferred == 0) stalls_ = kMaxStalls;
    if (kept == 0) return stalled();
    stalls_ = 0;
    rest_.offset += kept;
    rest_.data += kept;
    rest_.bytes -= kept;
    return Progress::kAgain;
}

Transfer::Progress Transfer::stalled() {
    if (++stalls_ < kMaxStalls) return Progress::kAgain;
    if (rest_.direction == Direction::kRead) return Progress::kEndOfFile;
    return fail(beyond_size_limit(rest_) ? EFBIG : EIO);
}

Transfer::Progress Transfer::fail(int error) {
    error_ = error;
    return Progress::kError;
}

std::string not_returned_text(const IoResult& result, FailureKind kind) {
    if (result.seconds == 0) return "was refused, since an earlier request has not returned";
    const bool card = kind == FailureKind::kDevice;
    std::ostringstream text;
    text << "did not return within " << (card ? 1000 * result.seconds : result.seconds) << (card ? " ms" : " s");
    return text.str();
}

}  // namespace smart_infinity
