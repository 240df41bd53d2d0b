#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/buffer.hpp"
#include "base/failure.hpp"
#include "extent/batch.hpp"
#include "io/io_scheduler.hpp"
#include "tensor/tensor_store.hpp"

namespace smart_infinity {

// Addresses for all gradients of a rank. Blocks use memory from take() until drop(), by granules: a granule is returned
// to the system when none of its blocks is taken. Granules of huge pages make both calls cheap.
class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
    // `granule` is a multiple of kBlockBytes, and is rounded up to whole pages. Throws std::invalid_argument if it is
    // not such a multiple, and the same exceptions as HostBuffer.
    explicit GradientMemory(std::size_t bytes, std::size_t granule = kBlockBytes);

    std::byte* data() const { return buffer_.data(); }
    std::size_t bytes() const { return buffer_.bytes(); }
    // Both take ranges of whole blocks, and may be repeated. Dropped blocks have undefined content.
    void take(std::size_t offset, std::size_t bytes);
    void drop(std::size_t offset, std::size_t bytes);

 private:
    HostBuffer buffer_;
    const std::size_t blocks_per_granule_;
    std::mutex mutex_;
    std::vector<bool> taken_;             // by block
    std::vector<std::size_t> num_taken_;  // by granule
};

// The gradient of one tasklet during one step: where its memory is and whether the update drops it, or where on storage
// it is read from.
class GradientWindow {
 public:
    enum class Afterwards { kKeep, kDrop };
    using Fetched = std::function<void(std::optional<Failure> failure)>;

    // `extent`, if any, contains the gradient in `store`. Throws std::invalid_argument if the bytes are not whole
    // blocks of the memory and of the extent.
    GradientWindow(std::shared_ptr<GradientMemory> memory, std::size_t offset, std::size_t bytes,
                   std::shared_ptr<TensorStore> store, std::shared_ptr<TensorExtent> extent, Afterwards afterwards);

    bool is_stored() const { return extent_ != nullptr; }
    std::size_t bytes() const { return bytes_; }
    // Starts reading a stored gradient into other memory, and returns at once. `fetched` is called on a thread of the
    // store, without a lock. An abandoned read keeps the memory.
    void fetch(std::shared_ptr<std::byte> into, IoClass io_class, Fetched fetched) const;
    // Returns the tasklet with its gradient's address changed to `there`.
    Tasklet moved(const Tasklet& tasklet, const std::byte* there) const;
    // Called after the update has used the gradient.
    void use();
    // Returns whether the update has used the gradient, so that its memory was dropped or may be changed.
    bool is_used() const { return used_; }

 private:
    const std::shared_ptr<GradientMemory> memory_;
    const std::size_t offset_;
    const std::size_t bytes_;
    const std::shared_ptr<TensorStore> store_;
    const std::shared_ptr<TensorExtent> extent_;
    const Afterwards afterwards_;
    std::atomic<bool> used_ = false;
};

}  // namespace smart_infinity
