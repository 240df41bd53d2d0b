#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "base/buffer.hpp"
#include "cuda/cuda_device.hpp"
#include "extent/batch.hpp"

namespace smart_infinity {

// The slots through which parameters of a CUDA device pass host memory: one per buffer of the ring, so the size does
// not grow with the model. A slot holds its tasklet's parameters at the tasklet's offsets.
class ParameterSlots {
 public:
    // Throws SystemError if memory is unavailable, CudaError if events are.
    ParameterSlots(std::shared_ptr<const CudaStream> stream, std::size_t num_slots, std::size_t slot_bytes);

    const std::shared_ptr<const CudaStream>& stream() const { return stream_; }
    std::size_t slot_bytes() const { return slot_bytes_; }
    std::size_t bytes() const { return memory_.bytes(); }
    std::byte* slot(std::size_t index) const { return memory_.data() + index * slot_bytes_; }

    // Starts copying the parameters that the tasklet reads from the device to its slot.
    void fetch(const Batch& batch, const Tasklet& tasklet, std::size_t index) const;
    // Starts copying the parameters that the tasklet wrote from its slot to the device.
    void deliver(const Batch& batch, const Tasklet& tasklet, std::size_t index) const;
    // Waits until the last copy that was started in this slot has completed. All three functions throw CudaError.
    void wait(std::size_t index) const { events_[index]->synchronize(); }

 private:
    template <class Copy>
    void start(std::size_t index, const Copy& copy) const;

    std::shared_ptr<const CudaStream> stream_;
    std::size_t slot_bytes_;
    HostBuffer memory_;
    std::vector<std::unique_ptr<CudaEvent>> events_;  // by slot
};

// Returns the slot bytes that the largest present or later tasklet of the batch needs: zero without parameters.
std::size_t slot_bytes(const Batch& batch);

// Returns whether some tasklet reads parameters from memory before it is computed.
bool takes_parameters(const Batch& batch);
// Returns whether tasklets write parameters out after they have been computed.
constexpr bool gives_parameters(Operation operation) {
    return operation == Operation::kUpdate || operation == Operation::kRead;
}

}  // namespace smart_infinity
