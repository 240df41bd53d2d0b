#include "tensor/memory_pool.hpp"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "base/process.hpp"

namespace smart_infinity {

std::size_t MemoryPool::touched_bytes(const Slab& slab, std::size_t offset, std::size_t bytes) {
    const auto first = slab.touched.begin() + static_cast<std::ptrdiff_t>(offset / kBlockBytes);
    const auto last = first + static_cast<std::ptrdiff_t>(bytes / kBlockBytes);
    return static_cast<std::size_t>(std::count(first, last, true)) * kBlockBytes;
}

std::unique_ptr<MemoryPool::Lease> MemoryPool::take(std::size_t bytes) {
    process_.require_current("MemoryPool");
    if (bytes == 0) throw std::invalid_argument("MemoryPool: no bytes");
    const std::size_t whole = align_up(bytes, kBlockBytes);
    const std::lock_guard lock(mutex_);
    for (auto slab = slabs_.begin(); slab != slabs_.end(); ++slab) {
        if (auto lease = lend(slab, whole)) return lease;
    }
    return lend(add_slab(whole), whole);
}

void MemoryPool::set_limit(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    limit_ = bytes;
    give_back_above_limit();
}

std::size_t MemoryPool::limit() const {
    const std::lock_guard lock(mutex_);
    return limit_;
}

std::size_t MemoryPool::used_bytes() const {
    const std::lock_guard lock(mutex_);
    return lent_ + idle_;
}

std::size_t MemoryPool::lent_bytes() const {
    const std::lock_guard lock(mutex_);
    return lent_;
}

std::unique_ptr<MemoryPool::Lease> MemoryPool::lend(Slabs::iterator slab, std::size_t bytes) {
    const auto offset = slab->ranges.allocate(bytes);
    if (!offset) return nullptr;
    idle_ -= touched_bytes(*slab, *offset, bytes);
    std::fill_n(slab->touched.begin() + static_cast<std::ptrdiff_t>(*offset / kBlockBytes), bytes / kBlockBytes, true);
    lent_ += bytes;
    give_back_above_limit();
    return std::make_unique<Lease>(shared_from_this(), slab, *offset, bytes);
}

MemoryPool::Slabs::iterator MemoryPool::add_slab(std::size_t bytes) {
    // A registered slab uses all of its memory at once, so it is no larger than the limit allows. Registering is slow:
    // a slab of its own for each lease would be too small for the next one.
    const std::size_t rest = limit_ - std::min(limit_, lent_ + idle_);
    slabs_.emplace_back(std::max(bytes, registrar_ ? std::min(kSlabBytes, align_up(rest, kBlockBytes)) : kSlabBytes));
    Slab& slab = slabs_.back();
    if (registrar_ && slab.buffer.try_register(registrar_)) {  // registering touches all blocks
        std::fill(slab.touched.begin(), slab.touched.end(), true);
        idle_ += slab.buffer.bytes();
    }
    return std::prev(slabs_.end());
}

void MemoryPool::take_back(const Lease& lease) {
    // A forked child has none of this memory, and the mutex may be locked there for ever.
    if (!process_.is_current()) return;
    const std::lock_guard lock(mutex_);
    lease.slab_->ranges.free(lease.offset_, lease.bytes_);
    lent_ -= lease.bytes_;
    idle_ += lease.bytes_;
    give_back_above_limit();
}

// Frees the last parts first, since the pool lends the first part that fits: that one then needs no new memory.
void MemoryPool::give_back_above_limit() {
    for (auto slab = slabs_.end(); slab != slabs_.begin() && idle_ > 0 && lent_ + idle_ > limit_;) {
        --slab;
        if (slab->ranges.taken() == 0) {
            idle_ -= touched_bytes(*slab, 0, slab->buffer.bytes());
            slab = slabs_.erase(slab);
        } else if (!registrar_) {
            give_back_above_limit(*slab);
        }
    }
}

// Returns the whole pages of free parts to the system, and keeps their addresses. A page may also contain a lent block.
void MemoryPool::give_back_above_limit(Slab& slab) {
    const auto& parts = slab.ranges.free_parts();
    for (auto part = parts.rbegin(); part != parts.rend() && lent_ + idle_ > limit_; ++part) {
        const std::size_t begin = align_up(part->first, page_bytes());
        const std::size_t end = (part->first + part->second) / page_bytes() * page_bytes();
        const std::size_t touched = begin < end ? touched_bytes(slab, begin, end - begin) : 0;
        if (touched == 0 || !slab.buffer.give_back(begin, end - begin)) continue;
        std::fill_n(slab.touched.begin() + static_cast<std::ptrdiff_t>(begin / kBlockBytes),
                    (end - begin) / kBlockBytes, false);
        idle_ -= touched;
    }
}

}  // namespace smart_infinity
