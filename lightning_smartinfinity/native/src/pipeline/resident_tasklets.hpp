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
    std::vector<std::size_t> extent_bytes;  // by tasklet: the first ones, which are resident
    bool writes_through = true;             // otherwise resident state is never written to storage
};

// Where a tasklet of a batch is worked, and where its state comes from.
enum class Residence {
    kNone,     // in a buffer of the ring
    kHeld,     // in its place, which holds the generation to read
    kUnheld,   // in its place, which is filled from storage or by the operation
    kMissing,  // in its place, which lacks the generation to read, as does storage
};

// Tasklets whose state stays in host memory. Each has a place as large as its extent, in which it is worked.
//
// A place records which generation it holds. What a failed or rolled back batch left there is never used: nothing asks
// for its generation. This class takes no lock.
class ResidentTasklets {
 public:
    // Throws SystemError if memory is unavailable, std::invalid_argument for a size that no extent has.
    explicit ResidentTasklets(const ResidentOptions& options);

    std::size_t count() const { return places_.size(); }
    std::size_t bytes() const { return memory_ ? memory_->bytes() : 0; }
    bool writes_through() const { return writes_through_; }

    bool include(const Tasklet& tasklet) const { return tasklet.index < places_.size(); }
    // Returns whether the tasklet's extent is as large as its place.
    bool fit(const Tasklet& tasklet) const { return places_[tasklet.index].bytes == tasklet.extent_bytes; }
    std::byte* place(const Tasklet& tasklet) const { return memory_->data() + places_[tasklet.index].offset; }

    Residence find(const Tasklet& tasklet, Operation operation) const;

    // Called before the tasklet is worked. A place that will change holds no generation until leave().
    void enter(const Tasklet& tasklet, Operation operation, Residence found);
    // Called after the tasklet was worked. Records the generation that its place now holds.
    void leave(const Tasklet& tasklet, Operation operation);

 private:
    struct Place {
        std::size_t offset;
        std::size_t bytes;
        std::optional<std::uint64_t> generation;
    };

    std::vector<Place> places_;
    bool writes_through_;
    std::unique_ptr<HostBuffer> memory_;  // null if there are no places
};

}  // namespace smart_infinity
