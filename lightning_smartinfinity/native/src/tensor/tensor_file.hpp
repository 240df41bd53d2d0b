#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>

#include "base/process.hpp"
#include "io/state_file.hpp"
#include "tensor/range_allocator.hpp"

namespace smart_infinity {

// Makes a file longer or shorter. New blocks are reserved if the file system supports it. If it fails, the file keeps
// its length. Returns zero or an errno.
int resize_file(int descriptor, std::uint64_t from, std::uint64_t to);

// A file of extents. It grows in large steps, and is shortened when much of its end is free. Both may wait for the
// device; no lock is held meanwhile, and free blocks of the file can still be allocated. A shared pointer owns it.
class TensorFile : public std::enable_shared_from_this<TensorFile> {
 public:
    // The file must be empty, and no other code may change its size. Steps are an eighth of the file, at most
    // `step_bytes`.
    TensorFile(StateFile file, std::uint64_t step_bytes) : file_(std::move(file)), step_bytes_(step_bytes) {}

    // Returns the offset of whole blocks. Throws SystemError if the file system has no room for them.
    std::uint64_t allocate(std::uint64_t bytes);
    // Does the same if the file has enough adjacent free blocks, so that no caller waits for the device.
    std::optional<std::uint64_t> allocate_free(std::uint64_t bytes);
    // Does not wait for the device. In a forked child it does nothing, since the file is the parent's.
    void free(std::uint64_t offset, std::uint64_t bytes);
    // From now on, removes only free blocks after the last extent of this moment. Then extents that are allocated and
    // freed repeatedly do not wait for the device each time.
    void keep_length();
    // Closes the file; later allocations fail.
    void close();

    StateFile file() const;
    std::uint64_t taken_bytes() const;
    std::uint64_t file_bytes() const;

 private:
    friend struct Seams;  // testing/seams.hpp

    std::uint64_t step() const;
    std::uint64_t used_length() const;
    void grow(std::unique_lock<std::mutex>& lock, std::uint64_t bytes);
    void give_back();
    void end_resizing();

    const Process process_;
    StateFile file_;
    const std::uint64_t step_bytes_;
    std::function<int(int, std::uint64_t, std::uint64_t)> resize_ = resize_file;
    mutable std::mutex mutex_;  // guards the members below and file_
    RangeAllocator ranges_;
    std::uint64_t kept_ = 0;  // length below which the file is not made shorter
    bool resizing_ = false;   // by one thread at a time, without the mutex
    std::condition_variable resized_;
    bool closed_ = false;
};

}  // namespace smart_infinity
