#include "pipeline/parameter_slots.hpp"

#include <algorithm>
#include <utility>

namespace smart_infinity {
namespace {

bool takes_parameters(const Batch& batch, const Tasklet& tasklet) {
    return tasklet.master_in_parameter || !gives_parameters(batch.operation);
}

bool gives_parameter(const Batch& batch, const Segment& segment) {
    return batch.operation == Operation::kRead || segment.step != kNoStep;
}

// Calls copy(device address, offset in the slot, bytes) for the parameters of the `wanted` segments, with one call for
// neighbours that are also adjacent on the device: a tasklet may have thousands of small parameters.
template <class Wanted, class Copy>
void for_each_run(const Tasklet& tasklet, const Wanted& wanted, const Copy& copy) {
    Address device = 0;
    std::size_t offset = 0;
    std::size_t bytes = 0;
    for (const Segment& segment : tasklet.segments) {
        if (segment.parameter == 0 || segment.numel == 0 || !wanted(segment)) continue;
        const std::size_t item = item_bytes(segment.parameter_dtype);
        const std::size_t begin = segment.offset * item;
        if (bytes != 0 && begin == offset + bytes && segment.parameter == device + bytes) {
            bytes += segment.numel * item;
            continue;
        }
        if (bytes != 0) copy(device, offset, bytes);
        device = segment.parameter;
        offset = begin;
        bytes = segment.numel * item;
    }
    if (bytes != 0) copy(device, offset, bytes);
}

}  // namespace

ParameterSlots::ParameterSlots(std::shared_ptr<const CudaStream> stream, std::size_t num_slots, std::size_t slot_bytes)
    : stream_(std::move(stream)), slot_bytes_(slot_bytes), memory_(num_slots * slot_bytes) {
    (void)memory_.try_register(stream_->device());
    for (std::size_t index = 0; index < num_slots; ++index) {
        events_.push_back(std::make_unique<CudaEvent>(stream_->device()));
    }
}

void ParameterSlots::fetch(const Batch& batch, const Tasklet& tasklet, std::size_t index) const {
    if (!takes_parameters(batch, tasklet)) return;
    start(index, [&] {
        for_each_run(
            tasklet, [](const Segment&) { return true; },
            [&](Address device, std::size_t offset, std::size_t bytes) {
                stream_->device()->copy_to_host(slot(index) + offset, device, bytes, stream_->handle());
            });
    });
}

void ParameterSlots::deliver(const Batch& batch, const Tasklet& tasklet, std::size_t index) const {
    start(index, [&] {
        for_each_run(
            tasklet, [&](const Segment& segment) { return gives_parameter(batch, segment); },
            [&](Address device, std::size_t offset, std::size_t bytes) {
                stream_->device()->copy_to_device(device, slot(index) + offset, bytes, stream_->handle());
            });
    });
}

// Copies that started before one failed still use the slot, so this waits for them before it reports the failure.
template <class Copy>
void ParameterSlots::start(std::size_t index, const Copy& copy) const {
    const CudaEvent& event = *events_[index];
    try {
        copy();
        event.record(stream_->handle());
    } catch (const CudaError&) {
        try {
            event.record(stream_->handle());
            event.synchronize();
        } catch (const CudaError&) {
            // The device and its copies are lost. The first failure states the reason.
        }
        throw;
    }
}

std::size_t slot_bytes(const Batch& batch) {
    std::size_t most = batch.slot_bytes;
    for (const Tasklet& tasklet : batch.tasklets) {
        for (const Segment& segment : tasklet.segments) {
            if (segment.parameter == 0) continue;
            most = std::max<std::size_t>(most, (segment.offset + segment.numel) * item_bytes(segment.parameter_dtype));
        }
    }
    return align_up(most, kBlockBytes);
}

bool takes_parameters(const Batch& batch) {
    return std::any_of(batch.tasklets.begin(), batch.tasklets.end(),
                       [&](const Tasklet& tasklet) { return takes_parameters(batch, tasklet); });
}

}  // namespace smart_infinity
