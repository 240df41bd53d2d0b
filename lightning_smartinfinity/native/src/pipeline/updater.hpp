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

// A tasklet to process. Its extent has been read, unless the operation reads nothing.
struct Job {
    const Batch& batch;
    const Tasklet& tasklet;
    std::size_t buffer;  // index in the ring, or the buffer of a resident tasklet
    ExtentMemory memory;
    std::byte* slot;  // holds parameters at their offsets; null: they are at the segments' addresses
    Guards guards;
};

// Processes the tasklets of a pipeline, on the host's CPU or on a device, in the buffers of a ring that it owns.
class Updater {
 public:
    Updater() = default;
    Updater(const Updater&) = delete;
    Updater& operator=(const Updater&) = delete;
    virtual ~Updater() = default;

    // Throws std::invalid_argument for a batch that this updater cannot process.
    virtual void require_workable(const Batch& batch) const = 0;

    virtual ExtentMemory memory(std::size_t buffer, const Tasklet& tasklet) const = 0;
    // Returns the ring's memory that an I/O engine may register; empty if there is none.
    virtual MemoryRange registrable() const = 0;
    virtual std::size_t host_bytes() const = 0;

    // Applies the operation to every segment, writes parameters and arrays out, and prepares the extent for writing.
    // Called by several threads, each with its own buffer. Returns why the tasklet is refused, or nothing.
    virtual std::optional<Refusal> work(const Job& job) = 0;

    // Called after a tasklet's extent has been read into its buffer or written from it.
    virtual void transferred(Direction, const Tasklet&) {}
    // Returns the bytes that a device has moved itself.
    virtual DeviceTraffic traffic() const { return {}; }
    // Sets a function to call before each transfer that the updater itself makes; tests use it to delay transfers.
    virtual void put_before_transfers(std::function<void(const IoRequest&)>) {}
    // Returns whether an abandoned call may still use the ring's memory; no work may be started then.
    virtual bool busy() const { return false; }
};

}  // namespace smart_infinity
