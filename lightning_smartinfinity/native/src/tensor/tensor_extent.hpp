#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/failure.hpp"
#include "io/file_queue.hpp"
#include "io/io_engine.hpp"
#include "tensor/tensor_file.hpp"

namespace smart_infinity {

// One tensor's bytes on storage. Its place is freed with the last reference to the extent; requests in progress hold
// one.
//
// It keeps the CRC-32C of every written block. With checks, a read therefore detects blocks that changed, blocks from
// another place, and blocks whose last write never reached storage. Blocks that were never written are zero.
class TensorExtent {
 public:
    enum class Checks : std::uint8_t { kNone, kChecksums };

    // Owns whole blocks of the file, which the destructor frees.
    TensorExtent(std::shared_ptr<TensorFile> file, std::uint64_t offset, std::uint64_t bytes, Checks checks);
    ~TensorExtent() { file_->free(offset_, bytes_); }
    TensorExtent(const TensorExtent&) = delete;
    TensorExtent& operator=(const TensorExtent&) = delete;

    const TensorFile& file() const { return *file_; }
    std::uint64_t offset() const { return offset_; }  // in the file
    std::uint64_t bytes() const { return bytes_; }
    std::uint64_t generation() const;  // the number of writes that have begun

    // Returns the earlier requests that a new request must not overtake; begun() records the request. `queue` is the
    // queue to which all are submitted. The caller serializes these calls for one extent with their submission.
    std::vector<FileQueue::Ticket> conflicts(Direction direction, std::uint64_t offset, std::size_t bytes,
                                             const FileQueue& queue);
    void begun(FileQueue::Ticket ticket, Direction direction, std::uint64_t offset, std::size_t bytes);

    // Called with each part that has ended; offsets are relative to the file. Records checksums of written blocks, and
    // checks blocks that were read. Returns the failure of the part.
    std::optional<Failure> ended(const IoRequest& part, std::optional<Failure> failure);

 private:
    enum class Block : std::uint8_t { kNeverWritten, kWritten, kUnknown };  // unknown: a write failed

    struct Begun {
        FileQueue::Ticket ticket;
        Direction direction;
        std::uint64_t begin;
        std::uint64_t end;
    };

    void remember(const IoRequest& part, bool failed);
    std::optional<Failure> check(const IoRequest& part);
    Failure mismatch(const IoRequest& part, std::size_t begin) const;
    Failure not_written(const IoRequest& part, std::size_t begin) const;

    const Checks checks_;
    const std::shared_ptr<TensorFile> file_;
    const std::uint64_t bytes_;
    const std::uint64_t offset_;
    // Requests on the same blocks do not overlap in time, so these two need no lock.
    std::vector<std::uint32_t> checksums_;
    std::vector<Block> blocks_;
    mutable std::mutex mutex_;  // guards the members below
    std::vector<Begun> begun_;  // the requests that may not have ended
    std::uint64_t generation_ = 0;
};

}  // namespace smart_infinity
