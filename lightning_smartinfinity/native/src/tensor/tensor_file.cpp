#include "tensor/tensor_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <system_error>
#include <thread>

#include "base/buffer.hpp"
#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint64_t kSmallestStep = std::uint64_t{1} << 20;

template <class Call>
int errno_of(const Call& call) {
    while (call() != 0) {
        if (errno != EINTR) return errno;
    }
    return 0;
}

}  // namespace

int resize_file(int descriptor, std::uint64_t from, std::uint64_t to) {
    const auto length = static_cast<off_t>(to), before = static_cast<off_t>(from);
    if (to > from) {
        // posix_fallocate() would write to every block on file systems that cannot reserve blocks.
        const int error = errno_of([=] { return ::fallocate(descriptor, 0, before, length - before); });
        if (error == 0) return 0;
        if (error != EOPNOTSUPP) {
            // A failed reservation may have reserved a part of the blocks.
            (void)errno_of([=] { return ::ftruncate(descriptor, before); });
            return error;
        }
    }
    return errno_of([=] { return ::ftruncate(descriptor, length); });
}

std::uint64_t TensorFile::allocate(std::uint64_t bytes) {
    std::unique_lock lock(mutex_);
    for (;;) {
        if (const auto offset = ranges_.allocate(bytes)) return *offset;
        if (resizing_) {
            resized_.wait(lock);
        } else {
            grow(lock, bytes - ranges_.free_tail());
        }
    }
}

std::optional<std::uint64_t> TensorFile::allocate_free(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    return ranges_.allocate(bytes);
}

void TensorFile::free(std::uint64_t offset, std::uint64_t bytes) {
    if (!process_.is_current()) return;
    const std::lock_guard lock(mutex_);
    ranges_.free(offset, bytes);
    give_back();
}

void TensorFile::keep_length() {
    const std::lock_guard lock(mutex_);
    kept_ = used_length();
    give_back();
}

void TensorFile::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    file_.close();
}

StateFile TensorFile::file() const {
    const std::lock_guard lock(mutex_);
    return file_;
}

std::uint64_t TensorFile::taken_bytes() const {
    const std::lock_guard lock(mutex_);
    return ranges_.taken();
}

std::uint64_t TensorFile::file_bytes() const {
    const std::lock_guard lock(mutex_);
    return ranges_.size();
}

std::uint64_t TensorFile::used_length() const { return ranges_.size() - ranges_.free_tail(); }

std::uint64_t TensorFile::step() const {
    const std::uint64_t eighth = std::max(align_up(ranges_.size() / 8, kBlockBytes), kSmallestStep);
    return std::min(eighth, step_bytes_);
}

void TensorFile::grow(std::unique_lock<std::mutex>& lock, std::uint64_t bytes) {
    const StateFile file = file_;
    const int descriptor = file.descriptor();
    const std::uint64_t end = ranges_.size();
    std::uint64_t reserved = std::max(bytes, step());
    resizing_ = true;
    lock.unlock();
    int error = resize_(descriptor, end, end + reserved);
    if (error != 0 && reserved > bytes) {  // the remaining space of the file system may be less than a step
        reserved = bytes;
        error = resize_(descriptor, end, end + reserved);
    }
    lock.lock();
    end_resizing();
    if (error != 0) {
        const std::string where = std::to_string(bytes) + " bytes at offset " + std::to_string(end);
        throw SystemError(error, "allocating " + where, file.path());
    }
    ranges_.grow(reserved);
}

// Keeps one step of free blocks, so that the file does not shrink and grow alternately.
void TensorFile::give_back() {
    const std::uint64_t end = ranges_.size(), needed = std::max(used_length(), kept_) + step();
    if (closed_ || resizing_ || end <= needed + step()) return;
    const std::uint64_t bytes = end - needed;
    // A thread shrinks the file, since the caller that drops an extent must not wait and may hold Python's lock.
    const auto shrink = [self = shared_from_this(), file = file_, bytes, end] {
        const int error = self->resize_(file.descriptor(), end, end - bytes);
        const std::lock_guard lock(self->mutex_);
        self->end_resizing();
        if (error != 0) return self->ranges_.grow(bytes);
        self->give_back();  // blocks that were freed meanwhile
    };
    try {
        std::thread(shrink).detach();
    } catch (const std::system_error&) {
        return;  // the file keeps its length, which does no harm
    }
    resizing_ = true;
    ranges_.shrink(bytes);
}

void TensorFile::end_resizing() {
    resizing_ = false;
    resized_.notify_all();
}

}  // namespace smart_infinity
