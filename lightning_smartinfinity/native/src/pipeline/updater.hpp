#pragma once

#include <cstddef>
#include <functional>
#include <optional>

#include "extent/batch.hpp"
#include "extent/extent_memory.hpp"
#include "extent/trailer.hpp"
#include "io/io_engines.hpp"
#include "pipeline/compute.hpp"
#include "pipeline/device_traffic.hpp"

namespace smart_infinity {

// A tasklet whose extent has been read, unless the operation reads nothing.
struct Job {
    const Batch& batch;
    const Tasklet& tasklet;
    std::size_t buffer;  // of the ring, or the number of a resident tasklet's
    ExtentMemory memory;
    std::byte* slot;  // of parameters at their offsets; null: they lie at the segments' addresses
    Guards guards;
};

// Works the tasklets of a pipeline, in the buffers of a ring that it owns: the host's CPU does, or a device.
class Updater {
 public:
    Updater() = default;
    Updater(const Updater&) = delete;
    Updater& operator=(const Updater&) = delete;
    virtual ~Updater() = default;

    // Throws std::invalid_argument for a batch that cannot be worked here.
    virtual void require_workable(const Batch& batch) const = 0;

    virtual ExtentMemory memory(std::size_t buffer, const Tasklet& tasklet) const = 0;
    // Memory of the ring that an I/O engine may register; empty: none.
    virtual MemoryRange registrable() const = 0;
    virtual std::size_t host_bytes() const = 0;

    // Does the operation on every segment, gives parameters and arrays out, and makes the extent ready for writing.
    // Called by several threads, with buffers of their own. Returns why the tasklet is not worked, if it is not.
    virtual std::optional<Refusal> work(const Job& job) = 0;

    // A tasklet's extent has been read into its buffer, or written from there.
    virtual void transferred(Direction, const Tasklet&) {}
    // Returns what a device has moved by itself.
    virtual DeviceTraffic traffic() const { return {}; }
    // Before transfers that it makes itself something is called that may keep them waiting, for tests.
    virtual void put_before_transfers(std::function<void(const IoRequest&)>) {}
    // Returns whether an abandoned call may still use the ring's memory: nothing may be begun.
    virtual bool busy() const { return false; }
};

}  // namespace smart_infinity
