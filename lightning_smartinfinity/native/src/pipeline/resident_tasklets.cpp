#include "pipeline/resident_tasklets.hpp"

#include <stdexcept>
#include <string>

namespace smart_infinity {

ResidentTasklets::ResidentTasklets(const ResidentOptions& options)
    : writes_through_(options.writes_through), memory_(options.memory) {
    for (const std::size_t bytes : options.extent_bytes) {
        if (bytes == 0 || bytes % kBlockBytes != 0 || bytes > std::size_t{1} << 40) {
            throw std::invalid_argument("Pipeline: a resident extent of " + std::to_string(bytes) +
                                        " bytes is not a multiple of " + std::to_string(kBlockBytes));
        }
        bytes_ += bytes;
    }
    if (memory_.empty() && bytes_ > 0) memory_.push_back(std::make_shared<HostBuffer>(bytes_));
    auto piece = memory_.begin();
    std::size_t offset = 0;
    for (const std::size_t bytes : options.extent_bytes) {
        if (piece != memory_.end() && offset + bytes > (*piece)->bytes()) {
            ++piece;
            offset = 0;
        }
        if (piece == memory_.end() || bytes > (*piece)->bytes()) {
            throw std::invalid_argument("Pipeline: no room for a resident extent of " + std::to_string(bytes) +
                                        " bytes");
        }
        places_.push_back({(*piece)->data() + offset, bytes, std::nullopt});
        offset += bytes;
    }
}

Residence ResidentTasklets::find(const Tasklet& tasklet, Operation operation) const {
    if (!include(tasklet)) return Residence::kNone;
    if (!reads(operation)) return Residence::kUnheld;
    if (places_[tasklet.index].generation == tasklet.read_generation) return Residence::kHeld;
    return writes_through_ ? Residence::kUnheld : Residence::kMissing;
}

void ResidentTasklets::enter(const Tasklet& tasklet, Operation operation, Residence found) {
    if (found == Residence::kNone || found == Residence::kMissing) return;  // nothing will change
    if (writes(operation) || found == Residence::kUnheld) places_[tasklet.index].generation.reset();
}

void ResidentTasklets::leave(const Tasklet& tasklet, Operation operation) {
    places_[tasklet.index].generation = writes(operation) ? tasklet.write_generation : tasklet.read_generation;
}

}  // namespace smart_infinity
