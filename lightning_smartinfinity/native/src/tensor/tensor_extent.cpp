#include "tensor/tensor_extent.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/buffer.hpp"
#include "checksum/crc32c.hpp"

namespace smart_infinity {
namespace {

// Calls `each` with the offset and length of every block of the part.
template <class Each>
void for_blocks(const IoRequest& part, const Each& each) {
    for (std::size_t begin = 0; begin < part.bytes; begin += kBlockBytes) {
        each(begin, std::min(kBlockBytes, part.bytes - begin));
    }
}

}  // namespace

TensorExtent::TensorExtent(std::shared_ptr<TensorFile> file, std::uint64_t offset, std::uint64_t bytes, Checks checks)
    : checks_(checks),
      file_(std::move(file)),
      bytes_(bytes),
      offset_(offset),
      checksums_(bytes_ / kBlockBytes),
      blocks_(bytes_ / kBlockBytes, Block::kNeverWritten) {}

std::uint64_t TensorExtent::generation() const {
    const std::lock_guard lock(mutex_);
    return generation_;
}

std::vector<FileQueue::Ticket> TensorExtent::conflicts(Direction direction, std::uint64_t offset, std::size_t bytes,
                                                       const FileQueue& queue) {
    const std::lock_guard lock(mutex_);
    std::erase_if(begun_, [&queue](const Begun& begun) { return queue.done(begun.ticket); });
    std::vector<FileQueue::Ticket> found;
    for (const Begun& begun : begun_) {
        const bool overlaps = begun.begin < offset + bytes && offset < begun.end;
        const bool writes = begun.direction == Direction::kWrite || direction == Direction::kWrite;
        if (overlaps && writes) found.push_back(begun.ticket);
    }
    return found;
}

void TensorExtent::begun(FileQueue::Ticket ticket, Direction direction, std::uint64_t offset, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    begun_.push_back({ticket, direction, offset, offset + bytes});
    generation_ += direction == Direction::kWrite;
}

std::optional<Failure> TensorExtent::ended(const IoRequest& part, std::optional<Failure> failure) {
    if (part.direction == Direction::kWrite) {
        remember(part, failure.has_value());
        return failure;
    }
    return failure ? std::move(failure) : check(part);
}

void TensorExtent::remember(const IoRequest& part, bool failed) {
    for_blocks(part, [&](std::size_t begin, std::size_t bytes) {
        const std::size_t block = (part.offset - offset_ + begin) / kBlockBytes;
        blocks_[block] = failed ? Block::kUnknown : Block::kWritten;
        if (!failed && checks_ == Checks::kChecksums) checksums_[block] = crc32c(part.data + begin, bytes);
    });
}

std::optional<Failure> TensorExtent::check(const IoRequest& part) {
    std::optional<Failure> failure;
    for_blocks(part, [&](std::size_t begin, std::size_t bytes) {
        if (failure) return;
        const std::size_t block = (part.offset - offset_ + begin) / kBlockBytes;
        if (blocks_[block] == Block::kNeverWritten) {
            std::memset(part.data + begin, 0, bytes);
        } else if (blocks_[block] == Block::kUnknown) {
            failure = not_written(part, begin);
        } else if (checks_ == Checks::kChecksums && crc32c(part.data + begin, bytes) != checksums_[block]) {
            failure = mismatch(part, begin);
        }
    });
    return failure;
}

Failure TensorExtent::mismatch(const IoRequest& part, std::size_t begin) const {
    const std::string path = file_->file().path();
    const std::uint64_t offset = part.offset + begin;
    return Failure{FailureKind::kChecksum,
                   path,
                   offset,
                   0,
                   0,
                   "the block at offset " + std::to_string(offset) + " of " + path +
                       " does not hold what was written there (generation " + std::to_string(generation()) + ")"};
}

Failure TensorExtent::not_written(const IoRequest& part, std::size_t begin) const {
    const std::string path = file_->file().path();
    const std::uint64_t offset = part.offset + begin;
    return Failure{FailureKind::kGeneration,
                   path,
                   offset,
                   0,
                   0,
                   "the block at offset " + std::to_string(offset) + " of " + path + " was not written: generation " +
                       std::to_string(generation()) + " failed"};
}

}  // namespace smart_infinity
