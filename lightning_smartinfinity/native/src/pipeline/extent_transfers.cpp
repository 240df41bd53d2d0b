#include "pipeline/extent_transfers.hpp"

#include <utility>

#include "extent/extent.hpp"
#include "pipeline/transfer_failures.hpp"

namespace smart_infinity {
namespace {

std::uint64_t index_of_file(const Tasklet& tasklet, Direction direction) {
    return direction == Direction::kRead ? tasklet.read_file : tasklet.write_file;
}

}  // namespace

ExtentTransfers::ExtentTransfers(const PipelineOptions& options, const MemoryRange& ring, std::size_t num_buffers,
                                 std::mutex& mutex, Counters& counters, Ended ended)
    : options_(options),
      mutex_(mutex),
      counters_(counters),
      ended_(std::move(ended)),
      transfers_(num_buffers * kMostParts),
      in_progress_(num_buffers),
      busy_(options.files.size()),
      engine_(make_engine(ring)) {
    counters_.files.resize(options.files.size());
    for (const StateFile& file : options_.files) {
        if (file.scheduler() != nullptr) schedulers_.insert(file.scheduler());
    }
    // Otherwise the reads and writes of a large ring would wait for each other at the scheduler.
    for (IoScheduler* const scheduler : schedulers_) scheduler->widen(ring_bytes_of_device());
}

ExtentTransfers::~ExtentTransfers() {
    for (IoScheduler* const scheduler : schedulers_) scheduler->narrow(ring_bytes_of_device());
}

std::size_t ExtentTransfers::ring_bytes_of_device() const {
    const std::size_t num_devices = schedulers_.size();
    return (options_.num_buffers + num_devices - 1) / num_devices * options_.buffer_bytes;
}

std::unique_ptr<IoEngine> ExtentTransfers::make_engine(const MemoryRange& ring) {
    auto engine = make_io_engine({options_.io_engine, options_.io_threads, options_.files, ring});
    if (!options_.timeout) return engine;
    auto with_deadlines = std::make_unique<DeadlineEngine>(std::move(engine), *options_.timeout);
    deadlines_ = with_deadlines.get();
    return with_deadlines;
}

void ExtentTransfers::start(std::size_t buffer, const Tasklet& tasklet, const ExtentMemory& memory, Direction direction,
                            IoClass io_class) {
    const StateFile& file = file_of(tasklet, direction);
    const bool read = direction == Direction::kRead;
    const std::size_t skipped = read ? skipped_bytes(options_.identity.format(), tasklet) : 0;
    const std::uint64_t place = read ? tasklet.read_offset : tasklet.write_offset;
    const std::vector<ExtentPart> parts = parts_of(tasklet, memory, skipped);
    in_progress_[buffer] = {&tasklet, parts.size(), direction, io_class, std::nullopt};
    std::size_t tag = buffer * kMostParts;
    for (const ExtentPart& part : parts) {
        const IoRequest whole{direction, file.descriptor(), place + part.offset, part.data, part.bytes, tag};
        transfers_[tag] = Transfer(whole, file.access());
        submit(transfers_[tag++]);
    }
}

void ExtentTransfers::hasten(std::size_t buffer, IoClass io_class) {
    InProgress& in_progress = in_progress_[buffer];
    if (in_progress.num_parts == 0 || in_progress.io_class <= io_class) return;
    in_progress.io_class = io_class;
    IoScheduler* const scheduler = file_of(*in_progress.tasklet, in_progress.direction).scheduler();
    if (scheduler == nullptr) return;
    for (std::size_t part = 0; part < kMostParts; ++part)
        scheduler->hasten(*this, buffer * kMostParts + part, io_class);
}

void ExtentTransfers::submit(const Transfer& transfer) {
    const IoRequest& rest = transfer.rest();
    const InProgress& in_progress = in_progress_[rest.tag / kMostParts];
    IoScheduler* const scheduler = file_of(*in_progress.tasklet, in_progress.direction).scheduler();
    if (scheduler == nullptr) return engine_->submit(rest, *this);
    scheduler->submit(*engine_, rest, in_progress.io_class, *this);
}

const StateFile& ExtentTransfers::file_of(const Tasklet& tasklet, Direction direction) const {
    return options_.files[index_of_file(tasklet, direction)];
}

const std::string& ExtentTransfers::path_of(const Tasklet& tasklet, Direction direction) const {
    return file_of(tasklet, direction).path();
}

std::vector<IoRequest> ExtentTransfers::abandoned_writes() const {
    return deadlines_ != nullptr ? deadlines_->abandoned_writes() : std::vector<IoRequest>();
}

void ExtentTransfers::completed(const IoRequest& request, const IoResult& result) {
    Transfer& transfer = transfers_[request.tag];
    const Transfer::Progress progress = transfer.advance(result);
    const std::lock_guard lock(mutex_);
    count(request, result);
    if (progress == Transfer::Progress::kAgain) return submit(transfer);
    const std::size_t buffer = request.tag / kMostParts;
    InProgress& in_progress = in_progress_[buffer];
    if (!in_progress.failure) in_progress.failure = failure_of(transfer, progress, result, *in_progress.tasklet);
    if (--in_progress.num_parts == 0) ended_(buffer, request.direction, std::move(in_progress.failure));
}

void ExtentTransfers::count(const IoRequest& request, const IoResult& result) {
    counters_.count(request.direction, result);
    const std::size_t file = index_of_file(*in_progress_[request.tag / kMostParts].tasklet, request.direction);
    busy_[file].ended(result.seconds);
    counters_.files[file].count(request.direction, result);
    counters_.files[file].busy_seconds = busy_[file].seconds();
}

std::optional<Failure> ExtentTransfers::failure_of(const Transfer& transfer, Transfer::Progress progress,
                                                   const IoResult& result, const Tasklet& tasklet) const {
    const std::string& path = path_of(tasklet, transfer.rest().direction);
    if (progress == Transfer::Progress::kNotReturned) {
        const FailureKind kind = options_.make_updater ? FailureKind::kDevice : FailureKind::kTimeout;
        return not_returned(transfer.rest(), tasklet, path, result, kind);
    }
    return smart_infinity::failure_of(transfer, progress, tasklet, path);
}

}  // namespace smart_infinity
