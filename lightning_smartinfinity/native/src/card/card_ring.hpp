#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/buffer.hpp"
#include "card/card_calls.hpp"
#include "card/card_kernel.hpp"
#include "card/card_options.hpp"
#include "extent/state_format.hpp"

namespace smart_infinity {

// Memory on the card, and the address at which it is mapped.
struct MappedBuffer {
    explicit MappedBuffer(std::shared_ptr<CardBuffer> whole) : buffer(std::move(whole)), data(buffer->map()) {}

    std::shared_ptr<CardBuffer> buffer;
    std::byte* data;
};

// Throws CardError, also if the sync does not return in time.
void sync(CardCalls& calls, const MappedBuffer& buffer, Sync direction, std::size_t bytes, std::size_t offset);

constexpr std::size_t kStatusBytes = 4096;  // a kernel writes one beat of it

// One buffer of the ring: the memory that a tasklet needs on the card.
class CardBufferSet {
 public:
    CardBufferSet(const CardOptions& options, std::shared_ptr<CardKernel> kernel, std::size_t regions_bytes);

    const MappedBuffer& regions() const { return regions_; }
    const MappedBuffer& gradient() const { return gradient_; }
    const MappedBuffer& parameter() const { return parameter_; }
    const MappedBuffer& status() const { return status_; }

    // Returns the arrays, each a part of the regions.
    const std::vector<std::shared_ptr<CardBuffer>>& arrays(const Regions& regions);
    // Returns a run that is not in progress. A failed run is not kept for reuse: XRT may refuse to start it again.
    std::shared_ptr<CardRun> take_run();
    void keep(std::shared_ptr<CardRun> run) { run_ = std::move(run); }

 private:
    CardBufferSet(const CardOptions& options, const CardKernelType& type, std::shared_ptr<CardKernel> kernel,
                  std::size_t regions_bytes);

    std::shared_ptr<CardKernel> kernel_;
    MappedBuffer regions_;
    MappedBuffer gradient_;
    MappedBuffer parameter_;
    MappedBuffer status_;
    std::shared_ptr<CardRun> run_;
    std::vector<std::shared_ptr<CardBuffer>> arrays_;
    std::size_t arrays_bytes_ = 0;  // size of each array
};

// The ring's buffers on the card and, in host memory, their trailer pages and aligned memory for gradients that go
// through a file.
class CardRing {
 public:
    // Throws CardError if the card lacks the memory, SystemError if the host does.
    CardRing(const CardOptions& options, std::size_t num_buffers, std::size_t buffer_bytes);

    CardBufferSet& buffers(std::size_t index) { return sets_[index]; }
    std::byte* regions(std::size_t buffer) const { return sets_[buffer].regions().data; }
    std::byte* trailer_page(std::size_t buffer) const { return trailer_pages_.data() + buffer * kBlockBytes; }
    // Null if gradients do not go through a file.
    std::byte* staging(std::size_t buffer) const {
        return staging_ ? staging_->data() + buffer * gradient_buffer_bytes_ : nullptr;
    }
    std::uint64_t gradient_offset(std::size_t buffer) const { return buffer * gradient_buffer_bytes_; }
    std::size_t host_bytes() const { return trailer_pages_.bytes() + (staging_ ? staging_->bytes() : 0); }

 private:
    std::size_t gradient_buffer_bytes_;
    HostBuffer trailer_pages_;
    std::unique_ptr<HostBuffer> staging_;
    std::vector<CardBufferSet> sets_;
};

}  // namespace smart_infinity
