#pragma once

#include "base/buffer.hpp"
#include "pipeline/updater.hpp"

namespace smart_infinity {

// Updates tasklets on the host's CPU, in a ring in host memory.
class HostUpdater final : public Updater {
 public:
    HostUpdater(const Identity& identity, std::size_t num_buffers, std::size_t buffer_bytes)
        : identity_(identity), buffer_bytes_(buffer_bytes), ring_(num_buffers * buffer_bytes) {}

    void require_workable(const Batch&) const override {}
    ExtentMemory memory(std::size_t buffer, const Tasklet& tasklet) const override {
        return contiguous(ring_.data() + buffer * buffer_bytes_, tasklet);
    }
    MemoryRange registrable() const override { return {ring_.data(), ring_.bytes(), buffer_bytes_}; }
    std::size_t host_bytes() const override { return ring_.bytes(); }
    std::optional<Refusal> work(const Job& job) override {
        return compute(job.batch, job.tasklet, identity_, job.memory.regions, job.slot, job.guards);
    }

 private:
    const Identity identity_;
    const std::size_t buffer_bytes_;
    HostBuffer ring_;
};

}  // namespace smart_infinity
