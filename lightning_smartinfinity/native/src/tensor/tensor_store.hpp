#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/file_queue.hpp"
#include "tensor/tensor_extent.hpp"
#include "tensor/tensor_file.hpp"

namespace smart_infinity {

// Tensors of any length on storage, which exist as long as they are referenced. The files do not outlive the process.
class TensorStore {
 public:
    using Ticket = FileQueue::Ticket;

    static constexpr std::uint64_t kStepBytes = std::uint64_t{64} << 20;

    // The files must be empty, and no other code may change their size. Throws as FileQueue does. An abandoned request
    // keeps its place on storage; the owner of its memory must keep the memory while the store is busy.
    TensorStore(const std::vector<StateFile>& files, std::size_t io_threads, std::optional<IoEngineKind> io_engine,
                std::uint64_t step_bytes = kStepBytes, std::optional<FileQueue::Deadline> deadline = std::nullopt,
                TensorExtent::Checks checks = TensorExtent::Checks::kChecksums);
    ~TensorStore() { close(); }

    // Reserves blocks in the file with the fewest taken bytes. Throws SystemError.
    std::shared_ptr<TensorExtent> allocate(std::uint64_t bytes);
    // Does the same unless that file would have to grow. Never waits for the device.
    std::optional<std::shared_ptr<TensorExtent>> allocate_free(std::uint64_t bytes);

    // From now on, keeps the files at least as long as their present extents need.
    void keep_length();

    // Transfers whole blocks of an extent, and returns at once. The memory must exist until the request has ended. A
    // request waits for earlier ones on the same blocks if one of them writes. With checks, a read fails unless it
    // returns the written bytes. Throws std::invalid_argument if the bytes are not whole blocks inside the extent.
    Ticket submit(Direction direction, const std::shared_ptr<TensorExtent>& extent, std::uint64_t offset,
                  std::byte* data, std::size_t bytes, IoClass io_class);
    // Reads a whole extent in the same way, but without a ticket to wait for: `finished` is called when the read has
    // ended, on a thread of the store, without a lock. An abandoned read keeps `owner`, which owns the memory.
    void read(const std::shared_ptr<TensorExtent>& extent, std::byte* data, std::size_t bytes, IoClass io_class,
              std::shared_ptr<void> owner, FileQueue::Finished finished);
    // These are FileQueue's. Blocks whose write was cancelled before it started are unchanged.
    bool done(Ticket ticket) const { return queue_.done(ticket); }
    bool cancel(Ticket ticket) { return queue_.cancel(ticket); }
    std::optional<Failure> wait(Ticket ticket, const FileQueue::Poll& poll = [] {}) {
        return queue_.wait(ticket, poll);
    }

    Counters report() const { return queue_.report(); }
    IoEngineKind io_engine() const { return queue_.io_engine(); }
    bool busy() const { return queue_.busy(); }  // as in FileQueue
    std::uint64_t taken_bytes() const;           // of all extents
    std::uint64_t file_bytes() const;            // of all files
    // Waits for requests in flight, but not for abandoned ones, and closes the files.
    void close();

 private:
    friend struct Seams;  // testing/seams.hpp

    Ticket submit(Direction direction, const std::shared_ptr<TensorExtent>& extent, std::uint64_t offset,
                  std::byte* data, std::size_t bytes, FileQueue::Options options);

    const std::shared_ptr<TensorFile>& emptiest() const;

    const TensorExtent::Checks checks_;
    std::vector<std::shared_ptr<TensorFile>> files_;
    std::mutex mutex_;  // keeps submissions in the order in which extents record them
    FileQueue queue_;
};

}  // namespace smart_infinity
