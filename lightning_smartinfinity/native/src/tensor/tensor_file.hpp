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

// Makes a file longer, with its blocks reserved where the file system can, or shorter. If it fails, the file keeps its
// length. Returns zero or an errno.
int resize_file(int descriptor, std::uint64_t from, std::uint64_t to);

// A file of extents. Its blocks are allocated in large steps, and given back when much of the end is free. Both may
// wait for the device: no lock is held meanwhile, and what is free in the file can be allocated. A shared pointer owns
// it.
class TensorFile : public std::enable_shared_from_this<TensorFile> {
 public:
    // The file is empty, and nobody else changes its size. Steps are an eighth of the file, at most `step_bytes`.
    TensorFile(StateFile file, std::uint64_t step_bytes) : file_(std::move(file)), step_bytes_(step_bytes) {}

    // Returns the offset of whole blocks. Throws SystemError if the file system has no room for them.
    std::uint64_t allocate(std::uint64_t bytes);
    // Does the same if that many blocks are free together in the file, so that nobody waits for the device.
    std::optional<std::uint64_t> allocate_free(std::uint64_t bytes);
    // Does not wait for the device. In a forked child it does nothing, since the file is the parent's.
    void free(std::uint64_t offset, std::uint64_t bytes);
    // From now on, gives back what is free behind the end of the last extent of this moment, and nothing before it.
    // Extents that are allocated and freed again and again then do not wait for the device each time.
    void keep_length();
    // Closes the file; nothing is allocated later.
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
