#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>

#include "base/buffer.hpp"
#include "base/failure.hpp"
#include "io/io_scheduler.hpp"
#include "tensor/tensor_store.hpp"

namespace smart_infinity {

// Addresses for all gradients of a rank. What is not written to, or was dropped, takes up no memory.
class GradientMemory : public std::enable_shared_from_this<GradientMemory> {
 public:
    // Throws SystemError, std::invalid_argument as HostBuffer does.
    explicit GradientMemory(std::size_t bytes) : buffer_(bytes, Reserve::kNothing) {}

    std::byte* data() const { return buffer_.data(); }
    std::size_t bytes() const { return buffer_.bytes(); }
    // Gives whole blocks back to the system; they are zero then.
    void drop(std::size_t offset, std::size_t bytes) noexcept { buffer_.give_back(offset, bytes); }

 private:
    HostBuffer buffer_;
};

// The gradient of one tasklet during one step: where its memory is, what has to be read into it before the update, and
// whether the memory is dropped behind it.
class GradientWindow {
 public:
    enum class Afterwards { kKeep, kDrop };
    using Fetched = std::function<void(std::optional<Failure> failure)>;

    // `extent`, if there is one, holds the gradient in `store`. Throws std::invalid_argument if the bytes are not whole
    // blocks of the memory and of the extent.
    GradientWindow(std::shared_ptr<GradientMemory> memory, std::size_t offset, std::size_t bytes,
                   std::shared_ptr<TensorStore> store, std::shared_ptr<TensorExtent> extent, Afterwards afterwards);

    bool is_stored() const { return extent_ != nullptr; }
    // Starts reading it, and returns at once. `fetched` is called on a thread of the store, with no lock held. An
    // abandoned read keeps the memory.
    void fetch(IoClass io_class, Fetched fetched) const;
    // Is called when the update has used it.
    void use();
    // Returns whether the update has used it, so that its memory is dropped, or free to be changed.
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
