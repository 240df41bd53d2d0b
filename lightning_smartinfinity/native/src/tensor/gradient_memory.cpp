#include "tensor/gradient_memory.hpp"

#include <stdexcept>
#include <utility>

namespace smart_infinity {

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

void GradientWindow::fetch(IoClass io_class, Fetched fetched) const {
    store_->read(extent_, memory_->data() + offset_, bytes_, io_class, memory_, std::move(fetched));
}

void GradientWindow::use() {
    if (afterwards_ == Afterwards::kDrop) memory_->drop(offset_, bytes_);
    used_ = true;
}

}  // namespace smart_infinity
