#include "pipeline/schedule.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace smart_infinity {

// Returns whether the buffer is used by an action in flight, or by copies whose delivery must still be awaited.
bool TransferSchedule::Buffer::is_held() const {
    return stage == Stage::kReading || stage == Stage::kFetching || stage == Stage::kComputing ||
           write == Leg::kInFlight || deliver != Leg::kDone;
}

bool TransferSchedule::Buffer::works(Work work) const {
    switch (work) {
        case Work::kRead:
            return stage == Stage::kReading;
        case Work::kFetch:
            return stage == Stage::kFetching;
        case Work::kCompute:
            return stage == Stage::kComputing;
        case Work::kWrite:
            return write == Leg::kInFlight;
        case Work::kDeliver:
            break;
    }
    return deliver == Leg::kInFlight;
}

TransferSchedule::TransferSchedule(std::size_t num_tasklets, std::size_t num_buffers, Stages stages)
    : stages_(stages), num_buffers_(num_buffers), buffers_(num_buffers) {
    if (num_buffers == 0) throw std::invalid_argument("TransferSchedule: num_buffers must be at least 1");
    extend(num_tasklets);
}

void TransferSchedule::extend(std::size_t num_tasklets) {
    extend(std::vector<Way>(num_tasklets, Way{stages_.reads, stages_.writes}));
}

void TransferSchedule::extend(const std::vector<Way>& ways) {
    for (const Way& way : ways) {
        const std::size_t tasklet = ways_.size();
        ways_.push_back(way);
        ranks_.push_back(static_cast<std::int64_t>(tasklet));
        queue_of(tasklet).emplace(ranks_[tasklet], tasklet);
    }
    parameters_out_.resize(ways_.size(), false);
    complete_.resize(ways_.size(), false);
    if (!resident_.empty()) buffers_.resize(2 * num_buffers_);
}

void TransferSchedule::prefer(const std::vector<std::size_t>& tasklets) {
    lowest_rank_ -= static_cast<std::int64_t>(tasklets.size());
    std::int64_t rank = lowest_rank_;
    for (const std::size_t tasklet : tasklets) {
        Queue& queue = queue_of(tasklet);
        const bool waits = queue.erase({ranks_[tasklet], tasklet}) > 0;
        ranks_[tasklet] = rank++;
        if (waits) queue.emplace(ranks_[tasklet], tasklet);
    }
}

std::optional<Action> TransferSchedule::next() {
    if (Buffer* const buffer = lowest([](const Buffer& b) { return b.deliver == Leg::kWaiting; })) {
        return start(*buffer, Work::kDeliver);
    }
    if (stopped_) return std::nullopt;
    const auto at = [this](Stage stage) { return lowest([stage](const Buffer& b) { return b.stage == stage; }); };
    if (Buffer* const buffer = lowest([](const Buffer& b) { return b.write == Leg::kWaiting; })) {
        return start(*buffer, Work::kWrite);
    }
    if (Buffer* const buffer = at(Stage::kLoaded)) return start(*buffer, Work::kCompute);
    if (Buffer* const buffer = at(Stage::kRead)) return start(*buffer, Work::kFetch);
    if (const auto action = begin(false)) return action;
    return begin(true);
}

std::optional<Action> TransferSchedule::begin(bool resident) {
    Queue& waiting = resident ? resident_ : on_storage_;
    if (waiting.empty()) return std::nullopt;
    const auto middle = buffers_.begin() + static_cast<std::ptrdiff_t>(num_buffers_);
    const auto last = resident ? buffers_.end() : middle;
    const auto free = std::find_if(resident ? middle : buffers_.begin(), last,
                                   [](const Buffer& buffer) { return buffer.stage == Stage::kFree; });
    if (free == last) return std::nullopt;
    free->tasklet = waiting.begin()->second;
    waiting.erase(waiting.begin());
    return start(*free, first_work(ways_[free->tasklet]));
}

void TransferSchedule::done(Work work, std::size_t tasklet) {
    Buffer* const buffer = holder_of(tasklet);
    if (buffer == nullptr || !buffer->works(work)) {
        throw std::invalid_argument("TransferSchedule: no such action of tasklet " + std::to_string(tasklet) +
                                    " is in flight");
    }
    advance(*buffer, work);
}

void TransferSchedule::fail(Work work, std::size_t tasklet) {
    stop();
    Buffer* const buffer = holder_of(tasklet);
    if (buffer == nullptr || !buffer->works(work)) return;
    buffer->failed = true;
    // No action follows the failed one; the other leg, if in flight, must still end.
    if (work == Work::kWrite) {
        buffer->write = Leg::kDone;
    } else if (work == Work::kDeliver) {
        buffer->deliver = Leg::kDone;
    } else {
        buffer->stage = Stage::kFree;
    }
}

bool TransferSchedule::finished() const {
    if (stopped_) {
        return std::none_of(buffers_.begin(), buffers_.end(), [](const Buffer& buffer) { return buffer.is_held(); });
    }
    return all_started() && std::all_of(buffers_.begin(), buffers_.end(),
                                        [](const Buffer& buffer) { return buffer.stage == Stage::kFree; });
}

// There are few buffers: scanning them is cheaper than queues, and keeps the order of tasklets.
template <class Predicate>
TransferSchedule::Buffer* TransferSchedule::lowest(const Predicate& predicate) {
    Buffer* lowest = nullptr;
    for (Buffer& buffer : buffers_) {
        if (predicate(buffer) && (lowest == nullptr || buffer.tasklet < lowest->tasklet)) lowest = &buffer;
    }
    return lowest;
}

TransferSchedule::Buffer* TransferSchedule::holder_of(std::size_t tasklet) {
    const auto holder = std::find_if(buffers_.begin(), buffers_.end(), [tasklet](const Buffer& buffer) {
        return buffer.stage != Stage::kFree && buffer.tasklet == tasklet;
    });
    return holder == buffers_.end() ? nullptr : &*holder;
}

Work TransferSchedule::first_work(const Way& way) const {
    if (way.reads) return Work::kRead;
    return stages_.fetches ? Work::kFetch : Work::kCompute;
}

Action TransferSchedule::start(Buffer& buffer, Work work) {
    switch (work) {
        case Work::kRead:
            buffer.stage = Stage::kReading;
            break;
        case Work::kFetch:
            buffer.stage = Stage::kFetching;
            break;
        case Work::kCompute:
            buffer.stage = Stage::kComputing;
            break;
        case Work::kWrite:
            buffer.write = Leg::kInFlight;
            break;
        case Work::kDeliver:
            buffer.deliver = Leg::kInFlight;
    }
    return Action{work, buffer.tasklet, static_cast<std::size_t>(&buffer - buffers_.data())};
}

void TransferSchedule::advance(Buffer& buffer, Work work) {
    switch (work) {
        case Work::kRead:
            buffer.stage = after_read();
            return;
        case Work::kFetch:
            buffer.stage = Stage::kLoaded;
            return;
        case Work::kCompute:
            parameters_out_[buffer.tasklet] = true;
            buffer.stage = Stage::kComputed;
            buffer.write = ways_[buffer.tasklet].writes ? Leg::kWaiting : Leg::kDone;
            buffer.deliver = stages_.delivers ? Leg::kWaiting : Leg::kDone;
            break;
        case Work::kWrite:
            buffer.write = Leg::kDone;
            break;
        case Work::kDeliver:
            buffer.deliver = Leg::kDone;
    }
    if (buffer.write != Leg::kDone || buffer.deliver != Leg::kDone) return;
    buffer.stage = Stage::kFree;
    complete_[buffer.tasklet] = !buffer.failed;
}

}  // namespace smart_infinity
