#include "tensor/tensor_file.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "base/buffer.hpp"
#include "base/system_error.hpp"

namespace smart_infinity {
namespace {

constexpr std::uint64_t kSmallestStep = std::uint64_t{1} << 20;

// Returns zero or an errno.
int reserve(int descriptor, std::uint64_t offset, std::uint64_t bytes) {
    for (;;) {
        const int error = ::posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes));
        if (error != EINTR) return error;
    }
}

}  // namespace

std::uint64_t TensorFile::allocate(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto offset = ranges_.allocate(bytes)) return *offset;
    grow(bytes - ranges_.free_tail());
    return *ranges_.allocate(bytes);
}

void TensorFile::free(std::uint64_t offset, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    ranges_.free(offset, bytes);
    if (!closed_) give_back();
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

std::uint64_t TensorFile::step() const {
    const std::uint64_t eighth = std::max(align_up(ranges_.size() / 8, kBlockBytes), kSmallestStep);
    return std::min(eighth, step_bytes_);
}

void TensorFile::grow(std::uint64_t bytes) {
    const std::uint64_t end = ranges_.size();
    std::uint64_t reserved = std::max(bytes, step());
    int error = reserve(file_.descriptor(), end, reserved);
    if (error != 0 && reserved > bytes) {  // the last room of a file system is less than a step
        reserved = bytes;
        error = reserve(file_.descriptor(), end, reserved);
    }
    if (error != 0) {
        // A reservation that failed may have kept a part of the blocks.
        (void)!::ftruncate(file_.descriptor(), static_cast<off_t>(end));
        const std::string where = std::to_string(bytes) + " bytes at offset " + std::to_string(end);
        throw SystemError(error, "allocating " + where, file_.path());
    }
    ranges_.grow(reserved);
}

// Keeps as much as the file grows by, so that it does not shrink and grow in turn.
void TensorFile::give_back() {
    const std::uint64_t free = ranges_.free_tail();
    if (free <= 2 * step()) return;
    const std::uint64_t bytes = free - step();
    // A failure leaves the file as long as it is, which harms nobody.
    if (::ftruncate(file_.descriptor(), static_cast<off_t>(ranges_.size() - bytes)) == 0) ranges_.shrink(bytes);
}

}  // namespace smart_infinity
