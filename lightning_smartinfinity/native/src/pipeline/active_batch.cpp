#include "pipeline/active_batch.hpp"

#include <stdexcept>
#include <string>
#include <utility>

namespace smart_infinity {
namespace {

TransferSchedule::Way way_of(const TransferItem& item, const ResidentTasklets& residents) {
    const Operation operation = item.batch->operation;
    const bool is_resident = item.residence != Residence::kNone;
    const bool on_storage = !is_resident || residents.writes_through();
    return {.reads = reads(operation) && on_storage && item.residence != Residence::kHeld,
            .writes = writes(operation) && on_storage,
            .resident = is_resident};
}

// Returns `resident` with the batch's resident tasklets added.
std::vector<bool> listed(std::vector<bool> resident, const Batch& batch, const ResidentTasklets& residents) {
    for (const Tasklet& tasklet : batch.tasklets) {
        if (!residents.include(tasklet)) continue;
        if (resident[tasklet.index]) {
            throw std::invalid_argument("Pipeline: resident tasklet " + std::to_string(tasklet.index) +
                                        " is listed twice");
        }
        resident[tasklet.index] = true;
    }
    return resident;
}

}  // namespace

ActiveBatch::ActiveBatch(Batch batch, std::size_t num_buffers, const ResidentTasklets& residents)
    : operation(batch.operation),
      stream(batch.stream),
      resident(residents.count(), false),
      schedule(0, num_buffers,
               {.reads = reads(batch.operation),
                .writes = writes(batch.operation),
                .fetches = batch.stream != nullptr && takes_parameters(batch),
                .delivers = batch.stream != nullptr && gives_parameters(batch.operation)}) {
    add(std::move(batch), residents);
}

void ActiveBatch::add(Batch batch, const ResidentTasklets& residents) {
    resident = listed(resident, batch, residents);
    parts.push_back(std::make_unique<const Batch>(std::move(batch)));
    const Batch& part = *parts.back();
    std::vector<TransferSchedule::Way> ways;
    for (const Tasklet& tasklet : part.tasklets) {
        items.push_back({&part, &tasklet, residents.find(tasklet, operation)});
        ways.push_back(way_of(items.back(), residents));
    }
    schedule.extend(ways);
}

}  // namespace smart_infinity
