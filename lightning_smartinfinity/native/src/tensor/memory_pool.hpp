#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "base/buffer.hpp"
#include "base/host_registrar.hpp"
#include "tensor/range_allocator.hpp"

namespace smart_infinity {

// Lends memory for direct I/O in pieces of any length. A returned piece is merged with free neighbours. Free memory is
// kept only up to the limit; the rest is returned to the system, wherever it is.
class MemoryPool : public std::enable_shared_from_this<MemoryPool> {
    struct Slab {
        explicit Slab(std::size_t bytes) : buffer(bytes), touched(bytes / kBlockBytes) { ranges.grow(bytes); }
        HostBuffer buffer;
        RangeAllocator ranges;
        std::vector<bool> touched;  // blocks that use memory
    };
    using Slabs = std::list<Slab>;

 public:
    // Lent memory, which the destructor returns. It may be used in place, without a copy.
    class Lease {
     public:
        Lease(std::shared_ptr<MemoryPool> pool, Slabs::iterator slab, std::size_t offset, std::size_t bytes)
            : pool_(std::move(pool)), slab_(slab), offset_(offset), bytes_(bytes) {}
        ~Lease() { pool_->take_back(*this); }
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;

        std::byte* data() const { return slab_->buffer.data() + offset_; }
        std::size_t bytes() const { return bytes_; }

     private:
        friend class MemoryPool;
        const std::shared_ptr<MemoryPool> pool_;
        const Slabs::iterator slab_;
        const std::size_t offset_;
        const std::size_t bytes_;
    };

    static constexpr std::size_t kSlabBytes = std::size_t{64} << 20;

    // Addresses are allocated in slabs. If there is a `registrar`, it registers them: copies from and to a device are
    // then asynchronous, and a slab keeps all of its memory while a part of it is lent.
    explicit MemoryPool(std::shared_ptr<const HostRegistrar> registrar = nullptr) : registrar_(std::move(registrar)) {}

    // Returns whole blocks with undefined content. If the limit is too low, it is exceeded until they are returned.
    // Throws SystemError if there is no memory, std::invalid_argument for zero bytes.
    std::unique_ptr<Lease> take(std::size_t bytes);

    // Sets the number of bytes above which idle memory is returned to the system.
    void set_limit(std::size_t bytes);
    std::size_t limit() const;
    std::size_t used_bytes() const;  // lent and idle
    std::size_t lent_bytes() const;

 private:
    std::unique_ptr<Lease> lend(Slabs::iterator slab, std::size_t bytes);
    Slabs::iterator add_slab(std::size_t bytes);
    void take_back(const Lease& lease);
    void give_back_above_limit();
    void give_back_above_limit(Slab& slab);
    static std::size_t touched_bytes(const Slab& slab, std::size_t offset, std::size_t bytes);

    const std::shared_ptr<const HostRegistrar> registrar_;
    const Process process_;
    mutable std::mutex mutex_;
    Slabs slabs_;
    std::size_t limit_ = 0;
    std::size_t lent_ = 0;
    std::size_t idle_ = 0;  // bytes of touched blocks that are not lent
};

}  // namespace smart_infinity
