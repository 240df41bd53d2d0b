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
    // Memory that whole extents fill in this order; if there is none, the pipeline allocates its own.
    std::vector<std::shared_ptr<HostBuffer>> memory = {};
};

// Where a tasklet of a batch is processed, and the source of its state.
enum class Residence {
    kNone,     // in a buffer of the ring
    kHeld,     // in its place, which contains the generation to read
    kUnheld,   // in its place, which storage or the operation fills
    kMissing,  // in its place; neither the place nor storage has the generation to read
};

// Tasklets whose state stays in host memory. Each has a place as large as its extent, where it is processed.
//
// A place records the generation that it contains. State that a failed or rolled back batch left there is never used,
// since no batch reads its generation. This class takes no lock.
class ResidentTasklets {
 public:
    // Throws SystemError if memory is unavailable, std::invalid_argument for a size that no extent has, or for memory
    // without room for all extents.
    explicit ResidentTasklets(const ResidentOptions& options);

    std::size_t count() const { return places_.size(); }
    std::size_t bytes() const { return bytes_; }
    bool writes_through() const { return writes_through_; }

    bool include(const Tasklet& tasklet) const { return tasklet.index < places_.size(); }
    // Returns whether the tasklet's extent is as large as its place.
    bool fit(const Tasklet& tasklet) const { return places_[tasklet.index].bytes == tasklet.extent_bytes; }
    std::byte* place(const Tasklet& tasklet) const { return places_[tasklet.index].data; }

    Residence find(const Tasklet& tasklet, Operation operation) const;

    // Called before the tasklet is processed. A place that will change has no generation until leave().
    void enter(const Tasklet& tasklet, Operation operation, Residence found);
    // Called after the tasklet was processed. Records the generation that its place now contains.
    void leave(const Tasklet& tasklet, Operation operation);

 private:
    struct Place {
        std::byte* data;
        std::size_t bytes;
        std::optional<std::uint64_t> generation;
    };

    std::vector<Place> places_;
    bool writes_through_;
    std::vector<std::shared_ptr<HostBuffer>> memory_;
    std::size_t bytes_ = 0;  // of all places
};

}  // namespace smart_infinity
