#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/buffer.hpp"
#include "extent/batch.hpp"

namespace smart_infinity {

struct ResidentOptions {
    std::vector<std::size_t> extent_bytes;  // of tasklets 0, 1, ...: those that are resident
    bool writes_through = true;             // else what is resident is on storage never
};

// Where a tasklet of a batch is worked, and what it finds there.
enum class Residence {
    kNone,     // in a buffer of the ring
    kHeld,     // in its place, which holds what it reads
    kUnheld,   // in its place, which storage or the operation fills
    kMissing,  // in its place, which alone could hold what it reads and does not
};

// Tasklets whose state stays in host memory, each in a place as large as its extent, in which it is worked.
//
// A place knows the generation it holds, so that it is never taken for another: what a failed or undone batch left
// there is of a generation that nothing asks for. Nothing here locks.
class ResidentTasklets {
 public:
    // Throws SystemError without memory, std::invalid_argument for a size that is no extent's.
    explicit ResidentTasklets(const ResidentOptions& options);

    std::size_t count() const { return places_.size(); }
    std::size_t bytes() const { return memory_ ? memory_->bytes() : 0; }
    bool writes_through() const { return writes_through_; }

    bool include(const Tasklet& tasklet) const { return tasklet.index < places_.size(); }
    // Whether the tasklet's extent is as large as its place.
    bool fit(const Tasklet& tasklet) const { return places_[tasklet.index].bytes == tasklet.extent_bytes; }
    std::byte* place(const Tasklet& tasklet) const { return memory_->data() + places_[tasklet.index].offset; }

    Residence find(const Tasklet& tasklet, Operation operation) const;

    // The tasklet is about to be worked: a place that changes holds nothing until it leaves.
    void enter(const Tasklet& tasklet, Operation operation, Residence found);
    // It was worked, and its place holds what the operation makes of it.
    void leave(const Tasklet& tasklet, Operation operation);

 private:
    struct Place {
        std::size_t offset;
        std::size_t bytes;
        std::optional<std::uint64_t> generation;
    };

    std::vector<Place> places_;
    bool writes_through_;
    std::unique_ptr<HostBuffer> memory_;  // none without places
};

}  // namespace smart_infinity
