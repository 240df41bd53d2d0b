#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace smart_infinity {

// Divides a range that can grow and shrink at its end. Adjacent free parts are merged, so that lengths may vary
// indefinitely. It uses the first part that fits, which keeps the end of the range free if possible.
class RangeAllocator {
 public:
    // Returns the offset of `bytes` bytes, or nothing if no free part is long enough.
    std::optional<std::uint64_t> allocate(std::uint64_t bytes);
    // Frees bytes that were allocated.
    void free(std::uint64_t offset, std::uint64_t bytes);
    // Appends free bytes.
    void grow(std::uint64_t bytes);
    // Removes free bytes from the end; at most free_tail().
    void shrink(std::uint64_t bytes);

    std::uint64_t free_tail() const;
    const std::map<std::uint64_t, std::uint64_t>& free_parts() const { return free_; }  // length by offset
    std::uint64_t size() const { return size_; }
    std::uint64_t taken() const { return taken_; }

 private:
    std::map<std::uint64_t, std::uint64_t> free_;
    std::uint64_t size_ = 0;
    std::uint64_t taken_ = 0;
};

}  // namespace smart_infinity
