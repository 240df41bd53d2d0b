#include "card/card_ring.hpp"

#include <string>
#include <utility>

#include "extent/trailer.hpp"

namespace smart_infinity {
namespace {

std::string ring_of(std::size_t num_buffers, std::size_t bytes) {
    return "a ring of " + std::to_string(num_buffers) + " buffers takes " + std::to_string(bytes) + " bytes";
}

// Returns the memory bank of the arrays. It must be the same for all, since they are parts of one buffer.
int group_of_arrays(const CardKernelType& type, CardKernel& kernel) {
    const int group = kernel.group(type.array_in(0));
    for (std::size_t array = 0; array < type.num_arrays; ++array) {
        if (kernel.group(type.array_in(array)) != group || kernel.group(type.array_out(array)) != group) {
            throw CardError("the arrays of kernel " + std::string(type.name) + " are in different memory banks");
        }
    }
    return group;
}

}  // namespace

void sync(CardCalls& calls, const MappedBuffer& buffer, Sync direction, std::size_t bytes, std::size_t offset) {
    const std::string name =
        "a sync of " + std::to_string(bytes) + " bytes " + (direction == Sync::kToCard ? "to" : "from") + " the card";
    calls.make(name, [on_card = buffer.buffer, direction, bytes, offset] { on_card->sync(direction, bytes, offset); });
}

CardBufferSet::CardBufferSet(const CardOptions& options, std::shared_ptr<CardKernel> kernel, std::size_t regions_bytes)
    : CardBufferSet(options, card_kernel_type(options.kernel), std::move(kernel), regions_bytes) {}

CardBufferSet::CardBufferSet(const CardOptions& options, const CardKernelType& type, std::shared_ptr<CardKernel> kernel,
                             std::size_t regions_bytes)
    : kernel_(std::move(kernel)),
      regions_(options.binding->allocate(regions_bytes, Memory::kPeerToPeer, group_of_arrays(type, *kernel_))),
      gradient_(options.binding->allocate(options.gradient_buffer_bytes,
                                          options.gradient_file ? Memory::kPeerToPeer : Memory::kNormal,
                                          kernel_->group(type.gradient()))),
      parameter_(options.binding->allocate(options.parameter_bytes, Memory::kNormal, kernel_->group(type.parameter()))),
      status_(options.binding->allocate(kStatusBytes, Memory::kNormal, kernel_->group(type.status()))) {}

// Caches the last arrays, since all tasklets except the last have the same size.
const std::vector<std::shared_ptr<CardBuffer>>& CardBufferSet::arrays(const Regions& regions) {
    const std::size_t bytes = regions.padded_bytes(0);
    if (arrays_bytes_ == bytes) return arrays_;
    arrays_.clear();
    arrays_bytes_ = 0;
    for (std::size_t array = 0; array < regions.count(); ++array) {
        arrays_.push_back(regions_.buffer->part(bytes, regions.offset(array)));
    }
    arrays_bytes_ = bytes;
    return arrays_;
}

std::shared_ptr<CardRun> CardBufferSet::take_run() { return run_ ? std::exchange(run_, nullptr) : kernel_->run(); }

CardRing::CardRing(const CardOptions& options, std::size_t num_buffers, std::size_t buffer_bytes)
    : gradient_buffer_bytes_(options.gradient_buffer_bytes), trailer_pages_(num_buffers * kTrailerPageBytes) {
    const std::size_t regions_bytes = buffer_bytes - kTrailerPageBytes;
    const std::size_t bytes =
        num_buffers * (regions_bytes + options.gradient_buffer_bytes + options.parameter_bytes + kStatusBytes);
    const std::string ring = ring_of(num_buffers, bytes);
    if (options.dram_bytes && bytes > *options.dram_bytes) {
        throw CardError("the card's DRAM is too small: " + ring + ", " + std::to_string(*options.dram_bytes) +
                        " are allowed");
    }
    if (options.gradient_file) staging_ = std::make_unique<HostBuffer>(num_buffers * gradient_buffer_bytes_);
    const std::shared_ptr<CardKernel> kernel = options.binding->kernel(options.kernel);
    try {
        while (sets_.size() < num_buffers) sets_.emplace_back(options, kernel, regions_bytes);
    } catch (const CardError& error) {
        throw CardError(
            ring + " of the card's DRAM, buffer " + std::to_string(sets_.size()) + " is unavailable: " + error.what(),
            error.error());
    }
}

}  // namespace smart_infinity
