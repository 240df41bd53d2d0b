#include "transfer_loop.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <utility>

#include "compute.hpp"
#include "stopwatch.hpp"
#include "system_error.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("Pipeline: " + problem);
}

PipelineOptions checked(PipelineOptions options) {
    require(!options.files.empty(), "at least one file is needed");
    require(options.num_buffers >= 1 && options.num_buffers <= 4096, "num_buffers must be in [1, 4096]");
    require(options.buffer_bytes >= 2 * kBlockBytes && options.buffer_bytes % kBlockBytes == 0 &&
                options.buffer_bytes <= std::size_t{1} << 40,
            "buffer_bytes must be a multiple of 4096, from 8192 on");
    require(options.io_threads >= 1 && options.io_threads <= 1024, "io_threads must be in [1, 1024]");
    require(options.compute_threads >= 1 && options.compute_threads <= 1024, "compute_threads must be in [1, 1024]");
    (void)checked_format(options.identity.state_format);
    for (const StateFile& file : options.files) (void)file.descriptor();
    return options;
}

Failure refused(const Refusal& refusal, const Tasklet& tasklet, const std::string& path) {
    const std::string message = "the extent of tasklet " + std::to_string(tasklet.index) + " at offset " +
                                std::to_string(tasklet.read_offset) + " of " + path + " is refused: " + refusal.message;
    return Failure{refusal.kind, path, tasklet.read_offset, 0, tasklet.index, message};
}

Failure abandoned() {
    return Failure{FailureKind::kIo, "", 0, ECANCELED, 0, "the batch was abandoned before it was done"};
}

// Does something with copies from or to a device.
template <class Copies>
std::optional<Failure> copying(const Tasklet& tasklet, const Copies& copies) {
    try {
        copies();
        return std::nullopt;
    } catch (const CudaError& error) {
        const std::string message =
            "copying the parameters of tasklet " + std::to_string(tasklet.index) + " failed: " + error.what();
        return Failure{FailureKind::kCuda, "", 0, error.result(), tasklet.index, message};
    }
}

}  // namespace

TransferLoop::Run::Run(Batch batch, std::size_t num_buffers, const ResidentTasklets& residents)
    : operation(batch.operation),
      stream(batch.stream),
      schedule(0, num_buffers,
               {.reads = reads(batch.operation),
                .writes = writes(batch.operation),
                .fetches = batch.stream != nullptr && takes_parameters(batch),
                .delivers = batch.stream != nullptr && gives_parameters(batch.operation)}),
      resident(residents.count(), false) {
    add(std::move(batch), residents);
}

void TransferLoop::Run::add(Batch batch, const ResidentTasklets& residents) {
    std::vector<bool> listed = resident;
    for (const Tasklet& tasklet : batch.tasklets) {
        if (!residents.include(tasklet)) continue;
        require(!listed[tasklet.index], "resident tasklet " + std::to_string(tasklet.index) + " is listed twice");
        listed[tasklet.index] = true;
    }
    resident = std::move(listed);
    parts.push_back(std::make_unique<const Batch>(std::move(batch)));
    const Batch& part = *parts.back();
    std::vector<TransferSchedule::Way> ways;
    for (const Tasklet& tasklet : part.tasklets) {
        const Item item = item_of(part, tasklet, residents);
        const bool on_storage = !item.is_resident || residents.writes_through();
        ways.push_back(
            {reads(operation) && on_storage && !item.is_held, writes(operation) && on_storage, item.is_resident});
        items.push_back(item);
    }
    schedule.extend(ways);
}

TransferLoop::Item TransferLoop::Run::item_of(const Batch& part, const Tasklet& tasklet,
                                              const ResidentTasklets& residents) const {
    const bool is_resident = residents.include(tasklet);
    return {&part, &tasklet, is_resident, is_resident && reads(operation) && residents.hold(tasklet)};
}

TransferLoop::TransferLoop(PipelineOptions options)
    : options_(checked(std::move(options))),
      ring_(options_.num_buffers * options_.buffer_bytes),
      resident_(options_.resident),
      transfers_(num_buffers()),
      items_(num_buffers()),
      positions_(num_buffers()),
      engine_(make_io_engine(io_options())),
      compute_pool_("smart-inf-cpu", options_.compute_threads, [this](const Action& action) { compute_item(action); }) {
}

TransferLoop::~TransferLoop() { close(); }

void TransferLoop::submit(Batch batch) {
    validate(batch);
    if (slot_bytes(batch) == 0) batch.stream.reset();  // nothing travels
    const std::lock_guard lock(mutex_);
    require_open();
    require(run_ == nullptr, "a batch is active; drain() it before the next one");
    auto run = std::make_shared<Run>(std::move(batch), options_.num_buffers, resident_);
    prepare_slots(*run->parts.front());
    run_ = std::move(run);
    start_ready();
}

void TransferLoop::validate(const Batch& batch) const {
    smart_infinity::validate(batch, options_.identity.format(), options_.files.size(), options_.buffer_bytes);
    for (const Tasklet& tasklet : batch.tasklets) {
        require(!resident_.include(tasklet) || resident_.fit(tasklet),
                "the extent of resident tasklet " + std::to_string(tasklet.index) + " has another size than its place");
    }
}

void TransferLoop::extend(Batch more) {
    validate(more);
    const std::lock_guard lock(mutex_);
    require_open();
    require(run_ != nullptr, "no batch is active that could be extended");
    require(more.operation == run_->operation, "a batch is extended by more of the same operation");
    // The slots were made for what the batch began with, and they are in use.
    require(more.stream == nullptr && run_->stream == nullptr, "a batch on a CUDA device cannot be extended");
    run_->add(std::move(more), resident_);
    start_ready();
}

// Looks at every tasklet once: what is out stays out.
std::optional<Failure> TransferLoop::wait(std::size_t first, std::optional<std::size_t> last, const Poll& poll) {
    std::unique_lock lock(mutex_);
    if (run_ != nullptr) last = last.value_or(run_->schedule.num_tasklets());
    const std::size_t end = last.value_or(first);
    require(first <= end, "wait() for tasklets [" + std::to_string(first) + ", " + std::to_string(end) + ")");
    return wait_until(lock, poll, end, [&](const TransferSchedule& schedule) {
        while (first < end && schedule.parameters_out(first)) ++first;
        return first == end;
    });
}

std::optional<Failure> TransferLoop::wait_for(const std::vector<std::size_t>& positions, const Poll& poll) {
    std::unique_lock lock(mutex_);
    const auto highest = std::max_element(positions.begin(), positions.end());
    auto next = positions.begin();
    return wait_until(lock, poll, highest == positions.end() ? 0 : *highest + 1, [&](const TransferSchedule& schedule) {
        while (next != positions.end() && schedule.parameters_out(*next)) ++next;
        return next == positions.end();
    });
}

template <typename Out>
std::optional<Failure> TransferLoop::wait_until(std::unique_lock<std::mutex>& lock, const Poll& poll, std::size_t end,
                                                Out out) {
    const Stopwatch stopwatch;
    require_open();
    const std::shared_ptr<Run> run = run_;
    if (run == nullptr) return std::nullopt;
    require(end <= run->schedule.num_tasklets(),
            "wait() for tasklet " + std::to_string(end - 1) + " of " + std::to_string(run->schedule.num_tasklets()));
    await(lock, poll, [&] { return run->failure || out(run->schedule); });
    counters_.wait_seconds += stopwatch.seconds();
    return run->failure;
}

std::optional<Failure> TransferLoop::drain(const Poll& poll) {
    const Stopwatch stopwatch;
    std::unique_lock lock(mutex_);
    require_open();
    const std::shared_ptr<Run> run = run_;
    if (run == nullptr) return std::nullopt;
    await(lock, poll, [&] { return run->schedule.finished(); });
    counters_.wait_seconds += stopwatch.seconds();
    if (run_ == run) run_ = nullptr;
    return run->failure;
}

TransferLoop::Report TransferLoop::report() const {
    const std::lock_guard lock(mutex_);
    return {with_usage(counters_, engine_->usage()), ring_.bytes() + (slots_ ? slots_->bytes() : 0), resident_.bytes()};
}

IoEngineKind TransferLoop::io_engine() const { return chosen(io_options()); }

IoOptions TransferLoop::io_options() const {
    return {options_.io_engine, options_.io_threads, options_.files,
            MemoryRange{ring_.data(), ring_.bytes(), options_.buffer_bytes}};
}

template <typename Condition>
void TransferLoop::await(std::unique_lock<std::mutex>& lock, const Poll& poll, const Condition& condition) {
    while (!changed_.wait_for(lock, kPollInterval, condition)) {
        lock.unlock();
        poll();
        lock.lock();
    }
}

void TransferLoop::abandon() {
    std::unique_lock lock(mutex_);
    abandon(lock);
}

void TransferLoop::abandon(std::unique_lock<std::mutex>& lock) {
    const std::shared_ptr<Run> run = run_;
    if (run == nullptr) return;
    if (!run->schedule.finished() && !run->failure) run->failure = abandoned();
    run->schedule.stop();
    changed_.notify_all();
    changed_.wait(lock, [&] { return run->schedule.finished(); });
    if (run_ == run) run_ = nullptr;
}

void TransferLoop::close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    abandon(lock);
}

void TransferLoop::decorate_engine(const Decorate& decorate) {
    const std::lock_guard lock(mutex_);
    require_open();
    require(run_ == nullptr, "a batch is active; drain() it first");
    engine_ = decorate(std::move(engine_));
}

void TransferLoop::require_open() const { require(!closed_, "it is closed"); }

// Made once: every batch of a run has tasklets, and a stream, like those of the first.
void TransferLoop::prepare_slots(const Batch& batch) {
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

std::byte* TransferLoop::buffer(std::size_t index) const {
    if (items_[index].is_resident) return resident_.place(*items_[index].tasklet);
    return ring_.data() + index * options_.buffer_bytes;
}

std::byte* TransferLoop::slot(const Batch& batch, std::size_t index) const {
    return batch.stream ? slots_->slot(index) : nullptr;
}

void TransferLoop::start_ready() {
    while (const auto action = run_->schedule.next()) start(*action);
}

void TransferLoop::start(const Action& action) {
    // A computed tasklet is written and delivered side by side: what it holds is read by one when the other starts.
    if (action.work != Work::kWrite && action.work != Work::kDeliver) {
        items_[action.buffer] = run_->items[action.tasklet];
        positions_[action.buffer] = action.tasklet;
        if (items_[action.buffer].is_resident) occupy(items_[action.buffer]);
    }
    switch (action.work) {
        case Work::kRead:
            return start_transfer(action, Direction::kRead);
        case Work::kCompute:
            return compute_pool_.push(action);
        case Work::kFetch:
        case Work::kDeliver:
            return copy_pool_->push(action);
        case Work::kWrite:
            return start_transfer(action, Direction::kWrite);
    }
}

// Again at each of its actions up to compute, whose end says what the place holds then.
void TransferLoop::occupy(const Item& item) {
    if (is_missing(item)) return;  // nothing will change
    if (writes(run_->operation) || !item.is_held) resident_.invalidate(*item.tasklet);
}

// In memory only, where what it reads is not.
bool TransferLoop::is_missing(const Item& item) const {
    return item.is_resident && !resident_.writes_through() && reads(item.batch->operation) && !item.is_held;
}

void TransferLoop::leave(const Item& item) {
    const Tasklet& tasklet = *item.tasklet;
    const bool writes = smart_infinity::writes(run_->operation);
    resident_.validate(tasklet, writes ? tasklet.write_generation : tasklet.read_generation);
    if (item.is_held) counters_.cached_read_bytes += tasklet.extent_bytes - skipped_bytes(tasklet);
    if (writes && !resident_.writes_through()) counters_.cached_write_bytes += tasklet.extent_bytes;
}

// The parameter is the master, or half of it: only what lies behind the first region is read.
std::size_t TransferLoop::skipped_bytes(const Tasklet& tasklet) const {
    return tasklet.master_in_parameter ? regions_of(options_.identity.format(), tasklet).offset(1) : 0;
}

void TransferLoop::start_transfer(const Action& action, Direction direction) {
    const Tasklet& tasklet = *items_[action.buffer].tasklet;
    const StateFile& file = options_.files[tasklet.file];
    const bool read = direction == Direction::kRead;
    const std::size_t skipped = read ? skipped_bytes(tasklet) : 0;
    const IoRequest whole{direction,
                          file.descriptor(),
                          (read ? tasklet.read_offset : tasklet.write_offset) + skipped,
                          buffer(action.buffer) + skipped,
                          tasklet.extent_bytes - skipped,
                          action.buffer};
    transfers_[action.buffer] = Transfer(whole, file.access());
    engine_->submit(whole, *this);
}

// On a thread of the engine.
void TransferLoop::completed(const IoRequest& request, const IoResult& result) {
    Transfer& transfer = transfers_[request.tag];
    const Transfer::Progress progress = transfer.advance(result);
    const std::lock_guard lock(mutex_);
    counters_.count(request.direction, result);
    if (progress == Transfer::Progress::kAgain) return engine_->submit(transfer.rest(), *this);
    end(request.direction == Direction::kRead ? Work::kRead : Work::kWrite, positions_[request.tag],
        failure_of(transfer, progress, *items_[request.tag].tasklet));
}

// On a thread of the compute pool. Neither run_ nor what the buffer holds can change: an action of it is in flight.
void TransferLoop::compute_item(const Action& action) {
    const Stopwatch stopwatch;
    const Item& item = items_[action.buffer];
    const Batch& batch = *item.batch;
    const Tasklet& tasklet = *item.tasklet;
    std::optional<Failure> failure = compute(item, action.buffer);
    const double seconds = stopwatch.seconds();
    // Copies start here, one tasklet's behind the other's; only their end is waited for elsewhere.
    if (!failure && run_->delivers()) {
        failure = copying(tasklet, [&] { slots_->deliver(batch, tasklet, action.buffer); });
    }
    const std::lock_guard lock(mutex_);
    counters_.compute_seconds += seconds;
    if (!failure && item.is_resident) leave(item);
    end(Work::kCompute, action.tasklet, std::move(failure));
}

std::optional<Failure> TransferLoop::compute(const Item& item, std::size_t buffer) const {
    const Tasklet& tasklet = *item.tasklet;
    const std::string& path = options_.files[tasklet.file].path();
    if (is_missing(item)) {
        return refused({FailureKind::kGeneration, "it is in memory only, where there is no such generation"}, tasklet,
                       path);
    }
    const Guards guards{.verifies = !item.is_held, .seals = !item.is_resident || resident_.writes_through()};
    const auto refusal = smart_infinity::compute(*item.batch, tasklet, options_.identity, this->buffer(buffer),
                                                 slot(*item.batch, buffer), guards);
    return refusal ? std::optional(refused(*refusal, tasklet, path)) : std::nullopt;
}

// On the thread that waits for copies. run_ cannot change, as above.
void TransferLoop::copy_item(const Action& action) {
    const Batch& batch = *items_[action.buffer].batch;
    const Tasklet& tasklet = *items_[action.buffer].tasklet;
    auto failure = copying(tasklet, [&] {
        if (action.work == Work::kFetch) slots_->fetch(batch, tasklet, action.buffer);
        slots_->wait(action.buffer);
    });
    const std::lock_guard lock(mutex_);
    end(action.work, action.tasklet, std::move(failure));
}

void TransferLoop::end(Work work, std::size_t tasklet, std::optional<Failure> failure) {
    if (failure) {
        run_->schedule.fail(work, tasklet);
        if (!run_->failure) run_->failure = std::move(failure);
    } else {
        run_->schedule.done(work, tasklet);
    }
    start_ready();
    changed_.notify_all();
}

std::optional<Failure> TransferLoop::failure_of(const Transfer& transfer, Transfer::Progress progress,
                                                const Tasklet& tasklet) const {
    if (progress == Transfer::Progress::kDone) return std::nullopt;
    const IoRequest& rest = transfer.rest();
    const std::string& path = options_.files[tasklet.file].path();
    const std::string where = std::to_string(rest.bytes) + " bytes at offset " + std::to_string(rest.offset) + " of " +
                              path + " (tasklet " + std::to_string(tasklet.index) + ")";
    if (progress == Transfer::Progress::kEndOfFile) {
        return Failure{FailureKind::kShort, path, rest.offset, 0, tasklet.index, "the file ends before " + where};
    }
    const std::string verb = rest.direction == Direction::kRead ? "reading " : "writing ";
    const std::string reason = std::generic_category().message(transfer.error());
    return Failure{FailureKind::kIo, path,          rest.offset,
                   transfer.error(), tasklet.index, verb + where + " failed: " + reason};
}

}  // namespace smart_infinity
