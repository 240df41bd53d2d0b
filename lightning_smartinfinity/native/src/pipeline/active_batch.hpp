#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "base/failure.hpp"
#include "extent/batch.hpp"
#include "pipeline/parameter_slots.hpp"
#include "pipeline/resident_tasklets.hpp"
#include "pipeline/schedule.hpp"

namespace smart_infinity {

// A tasklet, and the part of the batch that contains it. Neither moves in memory while the batch is active.
struct TransferItem {
    const Batch* batch = nullptr;
    const Tasklet* tasklet = nullptr;
    Residence residence = Residence::kNone;
    bool reads_state = true;      // from storage
    bool reads_gradient = false;  // from storage
};

// Returns whether a tasklet of the batch that is processed there is written to storage, if the operation writes.
bool is_written(const Batch& batch, Residence residence, const ResidentTasklets& residents);

// The active batch with all added tasklets. This struct takes no lock.
struct ActiveBatch {
    // Throws std::invalid_argument if a resident tasklet is listed twice.
    ActiveBatch(Batch batch, std::size_t num_buffers, const ResidentTasklets& residents);
    void add(Batch batch, const ResidentTasklets& residents);

    bool delivers() const { return stream != nullptr && gives_parameters(operation); }

    const Operation operation;
    const std::shared_ptr<const CudaStream> stream;
    const bool fetches;  // whether parameters come from the stream's device before tasklets are computed
    std::vector<std::unique_ptr<const Batch>> parts;
    std::vector<TransferItem> items;  // by position in the batch
    std::vector<bool> resident;       // by tasklet: whether it is resident and in the batch
    TransferSchedule schedule;
    std::optional<Failure> failure;
};

}  // namespace smart_infinity
