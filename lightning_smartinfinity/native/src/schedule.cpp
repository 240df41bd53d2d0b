#include "schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace smart_infinity {

TransferSchedule::TransferSchedule(std::size_t num_tasklets, std::size_t num_buffers, Stages stages)
    : stages_(stages), buffers_(num_buffers), parameters_out_(num_tasklets, false) {
    if (num_buffers == 0) throw std::invalid_argument("TransferSchedule: num_buffers must be at least 1");
}

std::optional<Action> TransferSchedule::next() {
    if (stopped_) return std::nullopt;
    if (Buffer* const buffer = lowest_at(Stage::kComputed)) return start(*buffer, Work::kWrite);
    if (Buffer* const buffer = lowest_at(Stage::kLoaded)) return start(*buffer, Work::kCompute);
    if (next_tasklet_ == num_tasklets()) return std::nullopt;
    const auto free = std::find_if(buffers_.begin(), buffers_.end(),
                                   [](const Buffer& buffer) { return buffer.stage == Stage::kFree; });
    if (free == buffers_.end()) return std::nullopt;
    free->tasklet = next_tasklet_++;
    return start(*free, stages_.reads ? Work::kRead : Work::kCompute);
}

void TransferSchedule::done(Work work, std::size_t tasklet) {
    Buffer* const buffer = holder_of(tasklet);
    if (buffer == nullptr || buffer->stage != stage_during(work)) {
        throw std::invalid_argument("TransferSchedule: no such action of tasklet " + std::to_string(tasklet) +
                                    " is in flight");
    }
    advance(*buffer);
}

void TransferSchedule::fail(std::size_t tasklet) {
    stop();
    Buffer* const buffer = holder_of(tasklet);
    if (buffer != nullptr && in_flight(buffer->stage)) buffer->stage = Stage::kFree;
}

bool TransferSchedule::finished() const {
    if (stopped_) {
        return std::none_of(buffers_.begin(), buffers_.end(),
                            [](const Buffer& buffer) { return in_flight(buffer.stage); });
    }
    return next_tasklet_ == num_tasklets() && std::all_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) {
               return buffer.stage == Stage::kFree;
           });
}

// A handful of buffers: scanning them is cheaper than keeping queues, and keeps the tasklets in order.
TransferSchedule::Buffer* TransferSchedule::lowest_at(Stage stage) {
    Buffer* lowest = nullptr;
    for (Buffer& buffer : buffers_) {
        if (buffer.stage == stage && (lowest == nullptr || buffer.tasklet < lowest->tasklet)) lowest = &buffer;
    }
    return lowest;
}

TransferSchedule::Buffer* TransferSchedule::holder_of(std::size_t tasklet) {
    const auto holder = std::find_if(buffers_.begin(), buffers_.end(), [tasklet](const Buffer& buffer) {
        return buffer.stage != Stage::kFree && buffer.tasklet == tasklet;
    });
    return holder == buffers_.end() ? nullptr : &*holder;
}

Action TransferSchedule::start(Buffer& buffer, Work work) {
    buffer.stage = stage_during(work);
    return Action{work, buffer.tasklet, static_cast<std::size_t>(&buffer - buffers_.data())};
}

TransferSchedule::Stage TransferSchedule::stage_during(Work work) {
    switch (work) {
        case Work::kRead:
            return Stage::kReading;
        case Work::kCompute:
            return Stage::kComputing;
        case Work::kWrite:
            break;
    }
    return Stage::kWriting;
}

bool TransferSchedule::in_flight(Stage stage) {
    return stage == Stage::kReading || stage == Stage::kComputing || stage == Stage::kWriting;
}

void TransferSchedule::advance(Buffer& buffer) {
    switch (buffer.stage) {
        case Stage::kReading:
            buffer.stage = Stage::kLoaded;
            break;
        case Stage::kComputing:
            parameters_out_[buffer.tasklet] = true;
            buffer.stage = stages_.writes ? Stage::kComputed : Stage::kFree;
            break;
        default:
            buffer.stage = Stage::kFree;
    }
}

}  // namespace smart_infinity
