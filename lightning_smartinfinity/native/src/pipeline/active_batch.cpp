#include "pipeline/active_batch.hpp"

#include <stdexcept>
#include <string>
#include <utility>

#include "tensor/gradient_memory.hpp"

namespace smart_infinity {
namespace {

bool is_on_storage(Residence residence, const ResidentTasklets& residents) {
    return residence == Residence::kNone || residents.writes_through();
}

TransferItem item_of(const Batch& batch, const Tasklet& tasklet, const ResidentTasklets& residents) {
    const Residence residence = residents.find(tasklet, batch.operation);
    const bool needs_state = reads(batch.operation) && residence != Residence::kHeld;
    return {.batch = &batch,
            .tasklet = &tasklet,
            .residence = residence,
            .reads_state = needs_state && is_on_storage(residence, residents),
            .reads_gradient =
                batch.operation == Operation::kUpdate && tasklet.gradient != nullptr && tasklet.gradient->is_stored()};
}

TransferSchedule::Way way_of(const TransferItem& item, const ResidentTasklets& residents) {
    return {.reads = item.reads_state || item.reads_gradient,
            .writes = writes(item.batch->operation) && is_written(*item.batch, item.residence, residents),
            .resident = item.residence != Residence::kNone};
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

bool is_written(const Batch& batch, Residence residence, const ResidentTasklets& residents) {
    return is_on_storage(residence, residents) && (residence == Residence::kNone || !batch.writes_back);
}

ActiveBatch::ActiveBatch(Batch batch, std::size_t num_buffers, const ResidentTasklets& residents)
    : operation(batch.operation),
      stream(batch.stream),
      fetches(batch.stream != nullptr && takes_parameters(batch)),
      resident(residents.count(), false),
      schedule(0, num_buffers,
               {.reads = reads(batch.operation),
                .writes = writes(batch.operation),
                .fetches = fetches,
                .delivers = batch.stream != nullptr && gives_parameters(batch.operation)}) {
    add(std::move(batch), residents);
}

void ActiveBatch::add(Batch batch, const ResidentTasklets& residents) {
    resident = listed(resident, batch, residents);
    parts.push_back(std::make_unique<const Batch>(std::move(batch)));
    const Batch& part = *parts.back();
    std::vector<TransferSchedule::Way> ways;
    for (const Tasklet& tasklet : part.tasklets) {
        items.push_back(item_of(part, tasklet, residents));
        ways.push_back(way_of(items.back(), residents));
    }
    schedule.extend(ways);
}

}  // namespace smart_infinity
