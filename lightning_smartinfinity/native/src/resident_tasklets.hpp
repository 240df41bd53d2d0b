#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "batch.hpp"
#include "buffer.hpp"

namespace smart_infinity {

struct ResidentOptions {
    std::vector<std::size_t> extent_bytes;  // of tasklets 0, 1, ...: those that are resident
    bool writes_through = true;             // else what is resident is on storage never
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

    // Whether the place holds what the tasklet reads.
    bool hold(const Tasklet& tasklet) const { return places_[tasklet.index].generation == tasklet.read_generation; }
    // The place is about to change; from now on it holds nothing.
    void invalidate(const Tasklet& tasklet) { places_[tasklet.index].generation.reset(); }
    void validate(const Tasklet& tasklet, std::uint64_t generation) { places_[tasklet.index].generation = generation; }

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
