#pragma once

#include <cstdint>
#include <mutex>

#include "io/state_file.hpp"
#include "tensor/range_allocator.hpp"

namespace smart_infinity {

// A file of extents. Its blocks are allocated in large steps, and given back when much of the end is free.
class TensorFile {
 public:
    // The file is empty, and nobody else changes its size. Steps are an eighth of the file, at most `step_bytes`.
    TensorFile(StateFile file, std::uint64_t step_bytes) : file_(std::move(file)), step_bytes_(step_bytes) {}

    // Returns the offset of whole blocks. Throws SystemError if the file system has no room for them.
    std::uint64_t allocate(std::uint64_t bytes);
    void free(std::uint64_t offset, std::uint64_t bytes);
    // Closes the file; nothing is allocated later.
    void close();

    StateFile file() const;
    std::uint64_t taken_bytes() const;
    std::uint64_t file_bytes() const;

 private:
    std::uint64_t step() const;
    void grow(std::uint64_t bytes);
    void give_back();

    StateFile file_;
    const std::uint64_t step_bytes_;
    mutable std::mutex mutex_;
    RangeAllocator ranges_;
    bool closed_ = false;
};

}  // namespace smart_infinity
