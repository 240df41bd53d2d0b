#include "pipeline/pipeline.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <utility>

#include "base/abandoned_call.hpp"
#include "base/numa.hpp"
#include "base/stopwatch.hpp"
#include "extent/ready_point.hpp"
#include "gradient/compression.hpp"
#include "gradient/validate_batch.hpp"
#include "pipeline/host_updater.hpp"
#include "pipeline/transfer_failures.hpp"
#include "tensor/gradient_memory.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("Pipeline: " + problem);
}

std::unique_ptr<Updater> make_updater(const PipelineOptions& options) {
    if (options.make_updater) return options.make_updater(options);
    return std::make_unique<HostUpdater>(options.identity, options.num_buffers, options.buffer_bytes);
}

// Calls copies(), which starts or awaits copies from or to a device. Returns its failure, or nothing.
template <class Copies>
std::optional<Failure> run_copies(const Tasklet& tasklet, const Copies& copies) {
    try {
        copies();
        return std::nullopt;
    } catch (const CudaError& error) {
        return not_copied(tasklet, error.result(), error.what());
    }
}

}  // namespace

Pipeline::Pipeline(PipelineOptions options)
    : options_(checked(std::move(options))),
      updater_(make_updater(options_)),
      resident_(options_.resident),
      items_(num_buffers()),
      positions_(num_buffers()),
      reads_(num_buffers()),
      transfers_(options_, updater_->registrable(), num_buffers(), mutex_, counters_,
                 [this](std::size_t buffer, Direction direction, std::optional<Failure> failure) {
                     transferred(buffer, direction, std::move(failure));
                 }),
      compute_pool_(start_computing()) {}

WorkerPool<Action> Pipeline::start_computing() {
    const OnNode on_node(node_of(options_.files));
    return WorkerPool<Action>("smart-inf-cpu", options_.compute_threads,
                              [this](const Action& action) { compute_item(action); });
}

// Abandoned calls still use the ring, the resident tasklets and the files, in threads that cannot be joined.
Pipeline::~Pipeline() {
    close();
    if (!busy()) return;
    struct Used {
        std::vector<StateFile> files;
        std::unique_ptr<Updater> updater;
        ResidentTasklets resident;
        std::unique_ptr<IoEngine> engine;
    };
    keep_for_ever(std::make_shared<Used>(
        Used{options_.files, std::move(updater_), std::move(resident_), transfers_.take_engine()}));
}

void Pipeline::submit(Batch batch) {
    validate(batch);
    require(accepts(batch), "what was abandoned, as it did not return in time, has not returned");
    if (slot_bytes(batch) == 0) batch.stream.reset();  // no parameters are copied
    const std::lock_guard lock(mutex_);
    require_open();
    require(batch_ == nullptr, "a batch is active; finish() it before the next one");
    auto active = std::make_shared<ActiveBatch>(std::move(batch), options_.num_buffers, resident_);
    prepare_slots(*active->parts.front());
    batch_ = std::move(active);
    start_ready();
}

// What an abandoned write still writes of a changed extent belongs to no generation. No later batch writes to its place
// before it has returned, and none reads or writes a buffer that it uses.
bool Pipeline::accepts(const Batch& batch) const {
    const std::lock_guard lock(mutex_);
    const bool has_failed = batch_ != nullptr && batch_->failure;  // and reports that
    const bool in_memory = batch.operation == Operation::kUpdate && batch.writes_back &&
                           std::ranges::all_of(batch.tasklets, [this](const Tasklet& tasklet) {
                               return resident_.find(tasklet, Operation::kUpdate) == Residence::kHeld;
                           });
    return !busy() || has_failed || in_memory;
}

void Pipeline::validate(const Batch& batch) const {
    updater_->require_workable(batch);
    smart_infinity::validate(batch, options_.identity.format(), options_.files.size(), options_.buffer_bytes);
    for (const Tasklet& tasklet : batch.tasklets) {
        require(!resident_.include(tasklet) || resident_.fit(tasklet),
                "the extent of resident tasklet " + std::to_string(tasklet.index) + " has another size than its place");
    }
}

void Pipeline::extend(Batch more) {
    validate(more);
    require(accepts(more), "what was abandoned, as it did not return in time, has not returned");
    const std::lock_guard lock(mutex_);
    require_open();
    require(batch_ != nullptr, "no batch is active that could be extended");
    require(more.operation == batch_->operation, "a batch is extended by more of the same operation");
    if (slot_bytes(more) > 0) {
        require(more.stream == batch_->stream, "a batch is extended by more whose parameters are on the same device");
        // The slots were sized for the first part of the batch, and they are in use.
        require(more.stream == nullptr || slot_bytes(more) <= slots_->slot_bytes(),
                "the parameters of a tasklet take " + std::to_string(slot_bytes(more)) + " bytes, and the slots have " +
                    std::to_string(slots_ ? slots_->slot_bytes() : 0));
        require(more.stream == nullptr || takes_parameters(more) == batch_->fetches,
                "a batch is extended by more that takes parameters as it does");
    }
    batch_->add(std::move(more), resident_);
    start_ready();
}

void Pipeline::prefer(const std::vector<std::size_t>& positions) {
    const std::lock_guard lock(mutex_);
    require_open();
    if (batch_ == nullptr) return;
    prefer_listed(positions);
}

void Pipeline::prefer_listed(const std::vector<std::size_t>& positions) {
    const std::size_t count = batch_->schedule.num_tasklets();
    for (const std::size_t position : positions) {
        require(position < count, "tasklet " + std::to_string(position) + " of " + std::to_string(count));
    }
    batch_->schedule.prefer(positions);
    for (std::size_t buffer = 0; buffer < positions_.size(); ++buffer) {
        if (transfers_.in_progress(buffer)) transfers_.hasten(buffer, io_class_of(positions_[buffer]));
    }
}

// Callers wait for the parameters of preferred tasklets.
IoClass Pipeline::io_class_of(std::size_t position) const {
    return batch_->schedule.preferred(position) ? IoClass::kGather : batch_->items[position].batch->io_class;
}

// Checks every tasklet only once: parameters that are out stay out.
std::optional<Failure> Pipeline::wait(std::size_t first, std::optional<std::size_t> last, const Poll& poll) {
    std::unique_lock lock(mutex_);
    if (batch_ != nullptr) last = last.value_or(batch_->schedule.num_tasklets());
    const std::size_t end = last.value_or(first);
    require(first <= end, "wait() for tasklets [" + std::to_string(first) + ", " + std::to_string(end) + ")");
    return wait_until(lock, poll, end, [&](const TransferSchedule& schedule) {
        while (first < end && schedule.parameters_out(first)) ++first;
        return first == end;
    });
}

std::optional<Failure> Pipeline::wait_for(const std::vector<std::size_t>& positions, const Poll& poll) {
    std::unique_lock lock(mutex_);
    if (batch_ != nullptr) prefer_listed(positions);
    auto next = positions.begin();
    return wait_until(lock, poll, 0, [&](const TransferSchedule& schedule) {
        while (next != positions.end() && schedule.parameters_out(*next)) ++next;
        return next == positions.end();
    });
}

template <typename Out>
std::optional<Failure> Pipeline::wait_until(std::unique_lock<std::mutex>& lock, const Poll& poll, std::size_t end,
                                            Out out) {
    const Stopwatch stopwatch;
    require_open();
    const std::shared_ptr<ActiveBatch> active = batch_;
    if (active == nullptr) return std::nullopt;
    require(end <= active->schedule.num_tasklets(),
            "wait() for tasklet " + std::to_string(end - 1) + " of " + std::to_string(active->schedule.num_tasklets()));
    await(lock, poll, [&] { return active->failure || out(active->schedule); });
    counters_.wait_seconds += stopwatch.seconds();
    return active->failure;
}

std::optional<Failure> Pipeline::finish(const Poll& poll) {
    const Stopwatch stopwatch;
    std::unique_lock lock(mutex_);
    require_open();
    const std::shared_ptr<ActiveBatch> active = batch_;
    if (active == nullptr) return std::nullopt;
    await(lock, poll, [&] { return active->schedule.finished(); });
    counters_.wait_seconds += stopwatch.seconds();
    forget(active);
    return active->failure;
}

Pipeline::Report Pipeline::report() const {
    const std::lock_guard lock(mutex_);
    return {with_usage(counters_, transfers_.usage()), updater_->traffic(),
            updater_->host_bytes() + (slots_ ? slots_->bytes() : 0) + (gradient_slots_ ? gradient_slots_->bytes() : 0),
            resident_.bytes()};
}

std::vector<std::size_t> Pipeline::complete() const {
    const std::lock_guard lock(mutex_);
    const std::vector<bool>& complete = batch_ != nullptr ? batch_->schedule.complete() : complete_;
    std::vector<std::size_t> positions;
    for (std::size_t position = 0; position < complete.size(); ++position) {
        if (complete[position]) positions.push_back(position);
    }
    return positions;
}

IoEngineKind Pipeline::io_engine() const {
    const std::lock_guard lock(mutex_);
    return transfers_.engine_kind();
}

template <typename Condition>
void Pipeline::await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition) {
    while (!changed_.wait_for(lock, kPollInterval, condition)) {
        lock.unlock();
        poll();
        lock.lock();
    }
}

void Pipeline::stop(const Poll& poll) {
    std::exception_ptr interrupt;
    std::unique_lock lock(mutex_);
    stop_batch(lock, [&] {
        try {
            if (!interrupt) poll();
        } catch (...) {
            interrupt = std::current_exception();
        }
    });
    lock.unlock();
    if (interrupt) std::rethrow_exception(interrupt);
}

void Pipeline::stop_batch(std::unique_lock<std::mutex>& lock, const Poll& poll) {
    const std::shared_ptr<ActiveBatch> active = batch_;
    if (active == nullptr) return;
    if (!active->schedule.finished() && !active->failure) active->failure = stopped();
    active->schedule.stop();
    changed_.notify_all();
    await(lock, poll, [&] { return active->schedule.finished(); });
    forget(active);
}

void Pipeline::forget(const std::shared_ptr<ActiveBatch>& active) {
    if (batch_ != active) return;
    complete_ = active->schedule.complete();
    batch_ = nullptr;
}

void Pipeline::close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    stop_batch(lock, [] {});
}

void Pipeline::require_open() const { require(!closed_, "it is closed"); }

// Slots are kept, because later batches of a run have similar tasklets and the same stream.
void Pipeline::prepare_slots(const Batch& batch) {
    if (!batch.stream) return;
    const std::size_t bytes = slot_bytes(batch);
    if (slots_ && slots_->stream() == batch.stream && slots_->slot_bytes() >= bytes) return;
    if (!copy_pool_) {
        copy_pool_ = std::make_unique<WorkerPool<Action>>("smart-inf-gpu", 1,
                                                          [this](const Action& action) { copy_item(action); });
    }
    slots_.reset();
    slots_ = std::make_unique<ParameterSlots>(batch.stream, num_buffers(), bytes);
}

// After the first batch the slots are usually large enough. If they grow, slots in use exist until their reads end.
std::shared_ptr<std::byte> Pipeline::gradient_slot(std::size_t buffer, std::size_t bytes) {
    const std::size_t all = num_buffers() * bytes;
    if (!gradient_slots_ || gradient_slots_->bytes() < all) gradient_slots_ = std::make_shared<HostBuffer>(all);
    const std::size_t slot_bytes = gradient_slots_->bytes() / num_buffers();
    return {gradient_slots_, gradient_slots_->data() + buffer * slot_bytes};
}

ExtentMemory Pipeline::memory(std::size_t buffer) const {
    const Tasklet& tasklet = *items_[buffer].tasklet;
    if (items_[buffer].residence != Residence::kNone) return contiguous(resident_.place(tasklet), tasklet);
    return updater_->memory(buffer, tasklet);
}

std::byte* Pipeline::slot(const Batch& batch, std::size_t index) const {
    return batch.stream ? slots_->slot(index) : nullptr;
}

void Pipeline::start_ready() {
    while (const auto action = batch_->schedule.next()) start(*action);
}

void Pipeline::start(const Action& action) {
    // A computed tasklet is written and delivered at the same time, so the second action must not change data that the
    // first one reads.
    if (action.work != Work::kWrite && action.work != Work::kDeliver) {
        const TransferItem& item = batch_->items[action.tasklet];
        items_[action.buffer] = item;
        positions_[action.buffer] = action.tasklet;
        resident_.enter(*item.tasklet, batch_->operation, item.residence);
    }
    switch (action.work) {
        case Work::kRead:
            return read(action);
        case Work::kCompute:
            return compute_pool_.push(action);
        case Work::kFetch:
        case Work::kDeliver:
            return copy_pool_->push(action);
        case Work::kWrite:
            return transfers_.start(action.buffer, *items_[action.buffer].tasklet, memory(action.buffer),
                                    Direction::kWrite, io_class_of(action.tasklet));
    }
}

void Pipeline::read(const Action& action) {
    const TransferItem& item = items_[action.buffer];
    const std::size_t buffer = action.buffer;
    const IoClass io_class = io_class_of(action.tasklet);
    reads_[buffer] = {int{item.reads_state} + int{item.reads_gradient}, std::nullopt, nullptr};
    if (item.reads_gradient) {
        const GradientWindow& gradient = *item.tasklet->gradient;
        reads_[buffer].gradient = gradient_slot(buffer, gradient.bytes());
        gradient.fetch(reads_[buffer].gradient, io_class, [this, buffer](std::optional<Failure> failure) {
            const std::lock_guard lock(mutex_);
            read_ended(buffer, std::move(failure));
        });
    }
    if (item.reads_state) transfers_.start(buffer, *item.tasklet, memory(buffer), Direction::kRead, io_class);
}

void Pipeline::read_ended(std::size_t buffer, std::optional<Failure> failure) {
    Reads& reads = reads_[buffer];
    if (!reads.failure) reads.failure = std::move(failure);
    if (--reads.num_left == 0) end(Work::kRead, positions_[buffer], std::exchange(reads.failure, std::nullopt));
}

void Pipeline::transferred(std::size_t buffer, Direction direction, std::optional<Failure> failure) {
    if (!failure) updater_->transferred(direction, *items_[buffer].tasklet);
    if (direction == Direction::kRead) return read_ended(buffer, std::move(failure));
    end(Work::kWrite, positions_[buffer], std::move(failure));
}

// Runs on a thread of the compute pool. Neither batch_ nor the buffer's tasklet changes while its action is in flight.
void Pipeline::compute_item(const Action& action) {
    const TransferItem& item = items_[action.buffer];
    const Batch& batch = *item.batch;
    const Tasklet& tasklet = *item.tasklet;
    std::optional<Failure> failure = run_copies(tasklet, [&] {
        for (const auto& point : batch.ready) point->synchronize();
    });
    const Stopwatch stopwatch;
    if (!failure) failure = compute(item, action.buffer);
    const double seconds = stopwatch.seconds();
    // Copies are started here, one tasklet after another; another thread waits for their end.
    if (!failure && batch_->delivers()) {
        failure = run_copies(tasklet, [&] { slots_->deliver(batch, tasklet, action.buffer); });
    }
    const std::lock_guard lock(mutex_);
    counters_.compute_seconds += seconds;
    if (!failure && item.residence != Residence::kNone) leave(item);
    end(Work::kCompute, action.tasklet, std::move(failure));
}

std::optional<Failure> Pipeline::compute(const TransferItem& item, std::size_t buffer) {
    const Tasklet& tasklet = *item.tasklet;
    if (item.residence == Residence::kMissing) {
        return refused({FailureKind::kGeneration, "it is in memory only, where there is no such generation"}, tasklet,
                       transfers_.path_of(tasklet, Direction::kRead));
    }
    const Guards guards{.verifies = item.residence != Residence::kHeld,
                        .seals = is_written(*item.batch, item.residence, resident_)};
    // Compressing here uses all compute threads, in parallel with reads and writes.
    std::optional<Tasklet> changed;
    if (item.reads_gradient) changed = tasklet.gradient->moved(tasklet, reads_[buffer].gradient.get());
    if (item.batch->codec) changed = compress(*item.batch, changed ? *changed : tasklet);
    const auto refusal = updater_->work(
        {*item.batch, changed ? *changed : tasklet, buffer, memory(buffer), slot(*item.batch, buffer), guards});
    if (refusal) return refused(*refusal, tasklet, transfers_.path_of(tasklet, Direction::kRead));
    if (tasklet.gradient && item.batch->operation == Operation::kUpdate) tasklet.gradient->use();
    return std::nullopt;
}

// Called after a resident tasklet was processed. Counts the transfers that its place saved.
void Pipeline::leave(const TransferItem& item) {
    const Tasklet& tasklet = *item.tasklet;
    resident_.leave(tasklet, batch_->operation);
    if (item.residence == Residence::kHeld) {
        counters_.cached_read_bytes += tasklet.extent_bytes - skipped_bytes(options_.identity.format(), tasklet);
    }
    if (writes(batch_->operation) && !is_written(*item.batch, item.residence, resident_)) {
        counters_.cached_write_bytes += tasklet.extent_bytes;
    }
}

// Runs on the thread that waits for copies. As in compute_item(), batch_ cannot change.
void Pipeline::copy_item(const Action& action) {
    const Batch& batch = *items_[action.buffer].batch;
    const Tasklet& tasklet = *items_[action.buffer].tasklet;
    auto failure = run_copies(tasklet, [&] {
        if (action.work == Work::kFetch) slots_->fetch(batch, tasklet, action.buffer);
        slots_->wait(action.buffer);
    });
    const std::lock_guard lock(mutex_);
    end(action.work, action.tasklet, std::move(failure));
}

void Pipeline::end(Work work, std::size_t tasklet, std::optional<Failure> failure) {
    if (failure) {
        batch_->schedule.fail(work, tasklet);
        if (!batch_->failure) batch_->failure = std::move(failure);
    } else {
        batch_->schedule.done(work, tasklet);
    }
    start_ready();
    changed_.notify_all();
}

}  // namespace smart_infinity
