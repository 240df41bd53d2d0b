#include "pipeline/transfer_loop.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "base/still_out.hpp"
#include "base/stopwatch.hpp"
#include "card/card_updater.hpp"
#include "gradient/compression.hpp"
#include "pipeline/host_updater.hpp"
#include "pipeline/transfer_failures.hpp"

namespace smart_infinity {
namespace {

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("Pipeline: " + problem);
}

// The card's memory goes to system calls of threads: io_uring would register it, which newer kernels refuse.
void require_card_fits(PipelineOptions& options) {
    require(options.files.size() == 1, "a card has one file");
    require(options.resident.extent_bytes.empty(), "a card has no resident tasklets");
    require(options.identity.format().on_cards, "a card updates fp32 state only");
    const bool direct = options.files.front().access() == Access::kDirect;
    const IoEngineKind kind = options.io_engine.value_or(direct ? IoEngineKind::kThreads : IoEngineKind::kPlain);
    require(kind == IoEngineKind::kThreads || kind == IoEngineKind::kPlain, "a card's I/O runs in threads");
    options.io_engine = kind;
}

PipelineOptions checked(PipelineOptions options) {
    require(!options.files.empty(), "at least one file is needed");
    require(options.num_buffers >= 1 && options.num_buffers <= kMaxBuffers,
            "num_buffers must be in [1, " + std::to_string(kMaxBuffers) + "]");
    require(options.buffer_bytes >= 2 * kBlockBytes && options.buffer_bytes % kBlockBytes == 0 &&
                options.buffer_bytes <= std::size_t{1} << 40,
            "buffer_bytes must be a multiple of " + std::to_string(kBlockBytes) + ", from " +
                std::to_string(2 * kBlockBytes) + " on");
    require(options.io_threads >= 1 && options.io_threads <= kMaxThreads,
            "io_threads must be in [1, " + std::to_string(kMaxThreads) + "]");
    require(options.compute_threads >= 1 && options.compute_threads <= kMaxThreads,
            "compute_threads must be in [1, " + std::to_string(kMaxThreads) + "]");
    (void)options.identity.format();
    for (const StateFile& file : options.files) (void)file.descriptor();
    if (options.card) require_card_fits(options);
    return options;
}

std::unique_ptr<Updater> make_updater(const PipelineOptions& options) {
    if (options.card) {
        return make_card_updater(*options.card, options.identity, options.num_buffers, options.buffer_bytes,
                                 options.compute_threads);
    }
    return std::make_unique<HostUpdater>(options.identity, options.num_buffers, options.buffer_bytes);
}

std::size_t file_of(const Tasklet& tasklet, Direction direction) {
    return direction == Direction::kRead ? tasklet.read_file : tasklet.write_file;
}

// Does something with copies from or to a device.
template <class Copies>
std::optional<Failure> copying(const Tasklet& tasklet, const Copies& copies) {
    try {
        copies();
        return std::nullopt;
    } catch (const CudaError& error) {
        return not_copied(tasklet, error.result(), error.what());
    }
}

}  // namespace

TransferLoop::TransferLoop(PipelineOptions options)
    : options_(checked(std::move(options))),
      updater_(make_updater(options_)),
      resident_(options_.resident),
      transfers_(num_buffers() * kMostPieces),
      under_way_(num_buffers()),
      items_(num_buffers()),
      positions_(num_buffers()),
      busy_(options_.files.size()),
      engine_(make_engine()),
      compute_pool_("smart-inf-cpu", options_.compute_threads, [this](const Action& action) { compute_item(action); }) {
    counters_.files.resize(options_.files.size());
}

// What is still out uses the ring and the files, and threads that cannot be waited for.
TransferLoop::~TransferLoop() {
    close();
    if (!busy()) return;
    struct Used {
        std::vector<StateFile> files;
        std::unique_ptr<Updater> updater;
        std::unique_ptr<IoEngine> engine;
    };
    keep_for_ever(std::make_shared<Used>(Used{options_.files, std::move(updater_), std::move(engine_)}));
}

void TransferLoop::submit(Batch batch) {
    validate(batch);
    require(!busy(), "what was given up for its time has not returned from the card");
    if (slot_bytes(batch) == 0) batch.stream.reset();  // nothing travels
    const std::lock_guard lock(mutex_);
    require_open();
    require(run_ == nullptr, "a batch is active; drain() it before the next one");
    auto run = std::make_shared<TransferRun>(std::move(batch), options_.num_buffers, resident_);
    prepare_slots(*run->parts.front());
    run_ = std::move(run);
    start_ready();
}

void TransferLoop::validate(const Batch& batch) const {
    updater_->require_workable(batch);
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

void TransferLoop::prefer(const std::vector<std::size_t>& positions) {
    const std::lock_guard lock(mutex_);
    require_open();
    if (run_ == nullptr) return;
    require_listed(*run_, positions);
    run_->schedule.prefer(positions);
}

void TransferLoop::require_listed(const TransferRun& run, const std::vector<std::size_t>& positions) {
    const std::size_t count = run.schedule.num_tasklets();
    for (const std::size_t position : positions) {
        require(position < count, "tasklet " + std::to_string(position) + " of " + std::to_string(count));
    }
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
    if (run_ != nullptr) {
        require_listed(*run_, positions);
        run_->schedule.prefer(positions);
    }
    auto next = positions.begin();
    return wait_until(lock, poll, 0, [&](const TransferSchedule& schedule) {
        while (next != positions.end() && schedule.parameters_out(*next)) ++next;
        return next == positions.end();
    });
}

template <typename Out>
std::optional<Failure> TransferLoop::wait_until(std::unique_lock<std::mutex>& lock, const Poll& poll, std::size_t end,
                                                Out out) {
    const Stopwatch stopwatch;
    require_open();
    const std::shared_ptr<TransferRun> run = run_;
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
    const std::shared_ptr<TransferRun> run = run_;
    if (run == nullptr) return std::nullopt;
    await(lock, poll, [&] { return run->schedule.finished(); });
    counters_.wait_seconds += stopwatch.seconds();
    forget(run);
    return run->failure;
}

TransferLoop::Report TransferLoop::report() const {
    const std::lock_guard lock(mutex_);
    Counters counters = with_usage(counters_, engine_->usage());
    updater_->count(counters);
    return {counters, updater_->host_bytes() + (slots_ ? slots_->bytes() : 0), resident_.bytes()};
}

std::vector<std::size_t> TransferLoop::complete() const {
    const std::lock_guard lock(mutex_);
    const std::vector<bool>& complete = run_ != nullptr ? run_->schedule.complete() : complete_;
    std::vector<std::size_t> positions;
    for (std::size_t position = 0; position < complete.size(); ++position) {
        if (complete[position]) positions.push_back(position);
    }
    return positions;
}

IoEngineKind TransferLoop::io_engine() const {
    const std::lock_guard lock(mutex_);
    return engine_->kind();
}

std::vector<IoRequest> TransferLoop::writes_out() const {
    return deadlines_ != nullptr ? deadlines_->writes_out() : std::vector<IoRequest>();
}

std::unique_ptr<IoEngine> TransferLoop::make_engine() {
    auto engine = make_io_engine(io_options());
    if (!options_.card) return engine;
    auto with_deadlines = std::make_unique<DeadlineEngine>(std::move(engine), options_.card->timeout);
    deadlines_ = with_deadlines.get();
    return with_deadlines;
}

IoOptions TransferLoop::io_options() const {
    return {options_.io_engine, options_.io_threads, options_.files, updater_->registrable()};
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
    const std::shared_ptr<TransferRun> run = run_;
    if (run == nullptr) return;
    if (!run->schedule.finished() && !run->failure) run->failure = abandoned();
    run->schedule.stop();
    changed_.notify_all();
    changed_.wait(lock, [&] { return run->schedule.finished(); });
    forget(run);
}

void TransferLoop::forget(const std::shared_ptr<TransferRun>& run) {
    if (run_ != run) return;
    complete_ = run->schedule.complete();
    run_ = nullptr;
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
    if (deadlines_ != nullptr) return deadlines_->decorate(decorate);
    engine_ = decorate(std::move(engine_));
}

void TransferLoop::put_before_transfers(std::function<void(const IoRequest&)> gate) {
    const std::lock_guard lock(mutex_);
    require_open();
    require(run_ == nullptr, "a batch is active; drain() it first");
    updater_->put_before_transfers(std::move(gate));
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

ExtentMemory TransferLoop::memory(std::size_t buffer) const {
    const Tasklet& tasklet = *items_[buffer].tasklet;
    if (items_[buffer].residence != Residence::kNone) return contiguous(resident_.place(tasklet), tasklet);
    return updater_->memory(buffer, tasklet);
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
        const TransferItem& item = run_->items[action.tasklet];
        items_[action.buffer] = item;
        positions_[action.buffer] = action.tasklet;
        resident_.enter(*item.tasklet, run_->operation, item.residence);
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

void TransferLoop::start_transfer(const Action& action, Direction direction) {
    const Tasklet& tasklet = *items_[action.buffer].tasklet;
    const StateFile& file = options_.files[file_of(tasklet, direction)];
    const bool read = direction == Direction::kRead;
    const std::size_t skipped = read ? skipped_bytes(options_.identity.format(), tasklet) : 0;
    const std::uint64_t place = read ? tasklet.read_offset : tasklet.write_offset;
    const std::vector<ExtentPiece> pieces = pieces_of(tasklet, memory(action.buffer), skipped);
    under_way_[action.buffer] = {pieces.size(), std::nullopt};
    std::size_t tag = action.buffer * kMostPieces;
    for (const ExtentPiece& piece : pieces) {
        const IoRequest whole{direction, file.descriptor(), place + piece.offset, piece.data, piece.bytes, tag};
        transfers_[tag++] = Transfer(whole, file.access());
        engine_->submit(whole, *this);
    }
}

const std::string& TransferLoop::path_of(const Tasklet& tasklet, Direction direction) const {
    return options_.files[file_of(tasklet, direction)].path();
}

void TransferLoop::count(const IoRequest& request, const IoResult& result) {
    counters_.count(request.direction, result);
    const std::size_t file = file_of(*items_[request.tag / kMostPieces].tasklet, request.direction);
    busy_[file].ended(result.seconds);
    counters_.files[file].count(request.direction, result);
    counters_.files[file].busy_seconds = busy_[file].seconds();
}

// On a thread of the engine, or of the one that watches it.
void TransferLoop::completed(const IoRequest& request, const IoResult& result) {
    Transfer& transfer = transfers_[request.tag];
    const Transfer::Progress progress = transfer.advance(result);
    const std::lock_guard lock(mutex_);
    count(request, result);
    if (progress == Transfer::Progress::kAgain) return engine_->submit(transfer.rest(), *this);
    const std::size_t buffer = request.tag / kMostPieces;
    const Tasklet& tasklet = *items_[buffer].tasklet;
    UnderWay& under_way = under_way_[buffer];
    if (!under_way.failure) under_way.failure = failure_of(transfer, progress, buffer);
    if (--under_way.num_pieces > 0) return;
    if (!under_way.failure) updater_->transferred(request.direction, tasklet);
    end(request.direction == Direction::kRead ? Work::kRead : Work::kWrite, positions_[buffer],
        std::move(under_way.failure));
}

std::optional<Failure> TransferLoop::failure_of(const Transfer& transfer, Transfer::Progress progress,
                                                std::size_t buffer) const {
    const Tasklet& tasklet = *items_[buffer].tasklet;
    const std::string& path = path_of(tasklet, transfer.rest().direction);
    if (progress == Transfer::Progress::kNotReturned) {
        return not_returned(transfer.rest(), tasklet, path, options_.card->timeout);
    }
    return smart_infinity::failure_of(transfer, progress, tasklet, path);
}

// On a thread of the compute pool. Neither run_ nor what the buffer holds can change: an action of it is in flight.
void TransferLoop::compute_item(const Action& action) {
    const Stopwatch stopwatch;
    const TransferItem& item = items_[action.buffer];
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
    if (!failure && item.residence != Residence::kNone) leave(item);
    end(Work::kCompute, action.tasklet, std::move(failure));
}

std::optional<Failure> TransferLoop::compute(const TransferItem& item, std::size_t buffer) {
    const Tasklet& tasklet = *item.tasklet;
    if (item.residence == Residence::kMissing) {
        return refused({FailureKind::kGeneration, "it is in memory only, where there is no such generation"}, tasklet,
                       path_of(tasklet, Direction::kRead));
    }
    const Guards guards{.verifies = item.residence != Residence::kHeld,
                        .seals = item.residence == Residence::kNone || resident_.writes_through()};
    // Here and not before: on all threads, beside what is read and written.
    std::optional<Tasklet> compressed;
    if (item.batch->codec) compressed = compress(*item.batch, tasklet);
    const auto refusal = updater_->work(
        {*item.batch, compressed ? *compressed : tasklet, buffer, memory(buffer), slot(*item.batch, buffer), guards});
    return refusal ? std::optional(refused(*refusal, tasklet, path_of(tasklet, Direction::kRead))) : std::nullopt;
}

// Of a resident tasklet that was worked: what the place saved is counted.
void TransferLoop::leave(const TransferItem& item) {
    const Tasklet& tasklet = *item.tasklet;
    resident_.leave(tasklet, run_->operation);
    if (item.residence == Residence::kHeld) {
        counters_.cached_read_bytes += tasklet.extent_bytes - skipped_bytes(options_.identity.format(), tasklet);
    }
    if (writes(run_->operation) && !resident_.writes_through()) counters_.cached_write_bytes += tasklet.extent_bytes;
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

}  // namespace smart_infinity
