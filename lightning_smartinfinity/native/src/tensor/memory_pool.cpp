#include "tensor/memory_pool.hpp"

#include <algorithm>
#include <stdexcept>

#include "base/process.hpp"

namespace smart_infinity {

std::unique_ptr<MemoryPool::Lease> MemoryPool::take(std::size_t bytes) {
    process_.require_current("MemoryPool");
    if (bytes == 0) throw std::invalid_argument("MemoryPool: no bytes");
    const std::size_t whole = align_up(bytes, kBlockBytes);
    const std::lock_guard lock(mutex_);
    const auto lend = [&](Slabs::iterator slab) -> std::unique_ptr<Lease> {
        const auto offset = slab->ranges.allocate(whole);
        if (!offset) return nullptr;
        lent_ += whole;
        return std::make_unique<Lease>(shared_from_this(), slab, *offset, whole);
    };
    for (auto slab = slabs_.begin(); slab != slabs_.end(); ++slab) {
        if (auto lease = lend(slab)) return lease;
    }
    unmap_idle(limit_ > whole ? limit_ - whole : 0);
    const std::size_t allowed = limit_ > mapped_ ? limit_ - mapped_ : 0;
    slabs_.emplace_back(std::max(whole, std::min(kSlabBytes, allowed / kBlockBytes * kBlockBytes)));
    mapped_ += slabs_.back().buffer.bytes();
    if (registrar_) slabs_.back().buffer.try_register(registrar_);
    return lend(std::prev(slabs_.end()));
}

void MemoryPool::set_limit(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    unmap_idle(limit_);
}

std::size_t MemoryPool::limit() const {
    const std::lock_guard lock(mutex_);
    return limit_;
}

std::size_t MemoryPool::mapped_bytes() const {
    const std::lock_guard lock(mutex_);
    return mapped_;
}

std::size_t MemoryPool::lent_bytes() const {
    const std::lock_guard lock(mutex_);
    return lent_;
}

void MemoryPool::take_back(const Lease& lease) {
    // A forked child has none of this memory, and may find the mutex held for ever.
    if (!process_.is_current()) return;
    const std::lock_guard lock(mutex_);
    lease.slab_->ranges.free(lease.offset_, lease.bytes_);
    lent_ -= lease.bytes_;
    unmap_idle(limit_);
}

void MemoryPool::unmap_idle(std::size_t at_most) {
    for (auto slab = slabs_.begin(); slab != slabs_.end() && mapped_ > at_most;) {
        if (slab->ranges.taken() > 0) {
            ++slab;
            continue;
        }
        mapped_ -= slab->buffer.bytes();
        slab = slabs_.erase(slab);
    }
}

}  // namespace smart_infinity
