#include "tensor/gradient_memory.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

namespace smart_infinity {

GradientMemory::GradientMemory(std::size_t bytes, std::size_t granule)
    : buffer_(bytes, Reserve::kNothing),
      blocks_per_granule_(align_up(granule, page_bytes()) / kBlockBytes),
      taken_(align_up(bytes, kBlockBytes) / kBlockBytes),
      num_taken_(blocks_per_granule_ == 0 ? 0 : taken_.size() / blocks_per_granule_ + 1) {
    if (granule == 0 || granule % kBlockBytes != 0) {
        throw std::invalid_argument("GradientMemory: a granule of " + std::to_string(granule) +
                                    " bytes is not made of whole blocks");
    }
}

void GradientMemory::take(std::size_t offset, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    for (std::size_t block = offset / kBlockBytes; block < (offset + bytes) / kBlockBytes; ++block) {
        if (taken_[block]) continue;
        taken_[block] = true;
        ++num_taken_[block / blocks_per_granule_];
    }
}

void GradientMemory::drop(std::size_t offset, std::size_t bytes) {
    const std::size_t end = taken_.size() * kBlockBytes;
    const std::size_t granule_bytes = blocks_per_granule_ * kBlockBytes;
    // Memory is returned under the lock: otherwise a block that is taken meanwhile could lose newly written data.
    const std::lock_guard lock(mutex_);
    for (std::size_t block = offset / kBlockBytes; block < (offset + bytes) / kBlockBytes; ++block) {
        if (!taken_[block]) continue;
        taken_[block] = false;
        const std::size_t granule = block / blocks_per_granule_;
        if (--num_taken_[granule] > 0) continue;
        const std::size_t begin = granule * granule_bytes;
        buffer_.give_back(begin, std::min(granule_bytes, end - begin));
    }
}

GradientWindow::GradientWindow(std::shared_ptr<GradientMemory> memory, std::size_t offset, std::size_t bytes,
                               std::shared_ptr<TensorStore> store, std::shared_ptr<TensorExtent> extent,
                               Afterwards afterwards)
    : memory_(std::move(memory)),
      offset_(offset),
      bytes_(bytes),
      store_(std::move(store)),
      extent_(std::move(extent)),
      afterwards_(afterwards) {
    const std::size_t end = align_up(memory_->bytes(), kBlockBytes);
    const bool inside = bytes > 0 && offset <= end && bytes <= end - offset;
    const bool whole = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0;
    if (!inside || !whole || (extent_ && (!store_ || extent_->bytes() != bytes))) {
        throw std::invalid_argument("GradientWindow: these are not whole blocks of the memory and of the extent");
    }
}

void GradientWindow::fetch(std::shared_ptr<std::byte> into, IoClass io_class, Fetched fetched) const {
    std::byte* const data = into.get();
    store_->read(extent_, data, bytes_, io_class, std::move(into), std::move(fetched));
}

Tasklet GradientWindow::moved(const Tasklet& tasklet, const std::byte* there) const {
    Tasklet moved = tasklet;
    const auto distance = reinterpret_cast<Address>(there) - reinterpret_cast<Address>(memory_->data() + offset_);
    for (Segment& segment : moved.segments) {
        if (segment.gradient != 0) segment.gradient += distance;
    }
    return moved;
}

void GradientWindow::use() {
    if (afterwards_ == Afterwards::kDrop && !extent_) memory_->drop(offset_, bytes_);
    used_ = true;
}

}  // namespace smart_infinity
