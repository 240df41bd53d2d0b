#include "io/file_queue.hpp"

#include <algorithm>
#include <condition_variable>
#include <iterator>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/abandoned_call.hpp"
#include "base/buffer.hpp"
#include "base/numa.hpp"
#include "base/stopwatch.hpp"
#include "io/deadline_engine.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {
namespace {

// Requests are split into parts of this size, which run concurrently: one thread alone does not saturate a disk.
constexpr std::size_t kPartBytes = std::size_t{4} << 20;

// The callback of such a part computes for less time than passing it to another thread takes.
constexpr std::size_t kSmallPartBytes = std::size_t{64} << 10;

void require_usage(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("FileQueue: " + problem);
}

Failure not_returned(const IoRequest& rest, const std::string& path, const IoResult& result, FailureKind kind) {
    const std::string verb = rest.direction == Direction::kRead ? "reading " : "writing ";
    const std::string where = std::to_string(rest.bytes) + " bytes at offset " + std::to_string(rest.offset);
    const std::string message = verb + where + " of " + path + " " + not_returned_text(result, kind);
    return Failure{kind, path, rest.offset, 0, 0, message};
}

Failure failure_of(const Transfer& transfer, Transfer::Progress progress, const std::string& path) {
    const IoRequest& rest = transfer.rest();
    const std::string where =
        std::to_string(rest.bytes) + " bytes at offset " + std::to_string(rest.offset) + " of " + path;
    if (progress == Transfer::Progress::kEndOfFile) {
        return Failure{FailureKind::kShort, path, rest.offset, 0, 0, "the file ends before " + where};
    }
    const std::string verb = rest.direction == Direction::kRead ? "reading " : "writing ";
    const std::string reason = std::generic_category().message(transfer.error());
    return Failure{FailureKind::kIo, path, rest.offset, transfer.error(), 0, verb + where + " failed: " + reason};
}

}  // namespace

FileQueue::FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine, MemoryRange memory,
                     std::optional<Deadline> deadline, bool computes, const std::vector<StateFile>& files)
    : deadline_(std::move(deadline)), engine_(make_engine({io_engine, io_threads, {}, memory, files})) {
    if (!computes || engine_->kind() != IoEngineKind::kUring) return;
    const OnNode on_node(node_of(files));
    const std::size_t cores = std::max(1u, std::thread::hardware_concurrency());
    callers_ = std::make_unique<WorkerPool<EndedPart>>("smart-inf-crc", std::min(io_threads, cores),
                                                       [this](const EndedPart& ended) { end_part(ended); });
}

FileQueue::~FileQueue() {
    close();
    if (!busy()) return;
    struct Used {
        std::vector<std::shared_ptr<Request>> requests;
        std::shared_ptr<void> memory;
        std::unique_ptr<IoEngine> engine;
    };
    keep_for_ever(std::make_shared<Used>(Used{std::move(abandoned_), std::move(deadline_->used), std::move(engine_)}));
}

std::unique_ptr<IoEngine> FileQueue::make_engine(const IoOptions& options) {
    auto engine = make_io_engine(options);
    if (!deadline_) return engine;
    auto watch = std::make_unique<DeadlineEngine>(std::move(engine), deadline_->timeout);
    watch_ = watch.get();
    return watch;
}

FileQueue::Ticket FileQueue::submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data,
                                    std::size_t bytes, const Options& options) {
    require_usage(bytes > 0, "no bytes");
    const bool aligned = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0 &&
                         reinterpret_cast<std::uintptr_t>(data) % kBlockBytes == 0;
    require_usage(aligned || file.access() == Access::kBuffered, "direct I/O wants whole blocks of 4096 bytes");
    const int descriptor = file.descriptor();
    const auto request = std::make_shared<Request>(file, options);
    const std::lock_guard lock(mutex_);
    require_usage(!closed_, "it is closed");
    for (std::size_t begin = 0; begin < bytes; begin += kPartBytes) {
        request->unstarted.push_back(
            {direction, descriptor, offset + begin, data + begin, std::min(kPartBytes, bytes - begin), next_tag_++});
    }
    request->parts_left = request->unstarted.size();
    const Ticket ticket = next_ticket_++;
    for (const Ticket before : options.after) {
        if (has_ended(before)) continue;
        requests_.at(before)->next.push_back(ticket);
        ++request->num_before;
    }
    requests_.emplace(ticket, request);
    ++num_unended_;
    if (request->num_before == 0) start(ticket, request);
    return ticket;
}

bool FileQueue::done(Ticket ticket) const {
    const std::lock_guard lock(mutex_);
    require_issued(ticket);
    return has_ended(ticket);
}

bool FileQueue::cancel(Ticket ticket) {
    Ended unused;
    const std::lock_guard lock(mutex_);
    require_issued(ticket);
    if (has_ended(ticket)) return false;
    const std::shared_ptr<Request> request = find(ticket);
    IoScheduler* const scheduler = request->file.scheduler();
    std::size_t num_cancelled = std::exchange(request->unstarted, {}).size();
    for (auto part = parts_.begin(); part != parts_.end();) {
        const bool whole = part->second.ticket == ticket && !part->second.attempted;
        const bool left_out = whole && scheduler && scheduler->cancel(*this, part->first);
        num_cancelled += left_out;
        part = left_out ? parts_.erase(part) : std::next(part);
    }
    request->parts_left -= num_cancelled;
    if (request->parts_left == 0) {
        unused = take_unused(*request);
        end_of(*request);
    }
    return num_cancelled > 0;
}

std::optional<Failure> FileQueue::wait(Ticket ticket, const Poll& poll) {
    const Stopwatch stopwatch;
    std::unordered_map<Ticket, std::shared_ptr<Request>>::node_type node;  // destroyed without a lock
    std::unique_lock lock(mutex_);
    require_issued(ticket);
    hasten(ticket);
    while (!changed_.wait_for(lock, kPollInterval, [&] { return has_ended(ticket); })) {
        lock.unlock();
        poll();
        lock.lock();
    }
    // The last poll runs while the ticket is open: if it throws, a caller can still wait for the request's failure.
    lock.unlock();
    poll();
    lock.lock();
    counters_.wait_seconds += stopwatch.seconds();
    node = requests_.extract(ticket);
    return node.empty() ? std::nullopt : std::move(node.mapped()->failure);
}

Counters FileQueue::report() const {
    const std::lock_guard lock(mutex_);
    IoUsage usage = engine_->usage();
    if (callers_) usage.cpu_seconds += callers_->cpu_seconds();
    return with_usage(counters_, usage);
}

IoEngineKind FileQueue::io_engine() const {
    const std::lock_guard lock(mutex_);
    return engine_->kind();
}

bool FileQueue::busy() const { return watch_ != nullptr && watch_->any_abandoned(); }

void FileQueue::close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.wait(lock, [&] { return num_unended_ == 0; });
}

std::optional<Failure> FileQueue::failure_of(const Part& part, Transfer::Progress progress,
                                             const IoResult& result) const {
    if (progress == Transfer::Progress::kDone) return std::nullopt;
    if (progress == Transfer::Progress::kNotReturned) {
        return not_returned(part.transfer.rest(), part.request->file.path(), result, deadline_->kind);
    }
    return smart_infinity::failure_of(part.transfer, progress, part.request->file.path());
}

void FileQueue::require_issued(Ticket ticket) const {
    require_usage(ticket < next_ticket_, "there is no ticket " + std::to_string(ticket));
}

bool FileQueue::has_ended(Ticket ticket) const {
    const std::shared_ptr<Request> request = find(ticket);
    return !request || request->parts_left == 0;
}

std::shared_ptr<FileQueue::Request> FileQueue::find(Ticket ticket) const {
    const auto request = requests_.find(ticket);
    return request == requests_.end() ? nullptr : request->second;
}

void FileQueue::start(Ticket ticket, const std::shared_ptr<Request>& request) {
    for (const IoRequest& whole : std::exchange(request->unstarted, {})) {
        const Part part{request, whole, Transfer(whole, request->file.access()), ticket};
        attempt(parts_.emplace(whole.tag, part).first->second);
    }
}

void FileQueue::attempt(const Part& part) {
    const IoRequest& rest = part.transfer.rest();
    IoScheduler* const scheduler = part.request->file.scheduler();
    if (scheduler == nullptr) return engine_->submit(rest, *this);
    scheduler->submit(*engine_, rest, part.request->options.io_class, *this);
}

// Also hastens the requests that this one must wait for.
void FileQueue::hasten(Ticket ticket) {
    if (has_ended(ticket)) return;
    const std::shared_ptr<Request> request = find(ticket);
    if (std::exchange(request->hastened, true)) return;
    for (const Ticket before : request->options.after) hasten(before);
    IoScheduler* const scheduler = request->file.scheduler();
    if (scheduler == nullptr || request->options.io_class == IoClass::kAwaited) return;
    request->options.io_class = IoClass::kAwaited;
    for (const auto& [tag, part] : parts_) {
        if (part.ticket == ticket) scheduler->hasten(*this, tag, IoClass::kAwaited);
    }
}

// Runs on a thread of the engine, or of the deadline engine around it.
void FileQueue::completed(const IoRequest& request, const IoResult& result) {
    std::unique_lock lock(mutex_);
    Part& found = parts_.at(request.tag);
    count(request.direction, result);
    const Transfer::Progress progress = found.transfer.advance(result);
    if (progress == Transfer::Progress::kAgain) {
        found.attempted = true;
        return attempt(found);
    }
    const bool refused = result.seconds == 0;
    const bool abandons = progress == Transfer::Progress::kNotReturned && !refused;
    if (abandons) abandoned_.push_back(found.request);
    const EndedPart ended{found, failure_of(found, progress, result), abandons};
    lock.unlock();
    if (callers_ && ended.part.whole.bytes > kSmallPartBytes) return callers_->push(ended);
    end_part(ended);
}

void FileQueue::end_part(const EndedPart& ended) {
    const auto& [part, reported, abandons] = ended;
    std::optional<Failure> failure = reported;
    if (part.request->options.ended) failure = part.request->options.ended(part.whole, std::move(failure));
    std::unique_lock lock(mutex_);
    Request& whole = *part.request;
    // The failure must show that the memory is still in use, so an abandoned part's failure replaces an earlier one.
    if (!whole.failure || (abandons && !whole.abandoned)) whole.failure = std::move(failure);
    whole.abandoned |= abandons;
    parts_.erase(part.whole.tag);
    if (whole.parts_left == 1) {
        // `ended` may hold the last reference to an extent, whose destructor may shorten a file.
        Ended unused = take_unused(whole);
        lock.unlock();
        unused = nullptr;
        lock.lock();
    }
    if (--whole.parts_left > 0) return;
    end_of(whole);
    const Finished finished = std::exchange(whole.options.finished, nullptr);
    if (!finished) return;
    requests_.erase(part.ticket);
    lock.unlock();
    finished(std::move(whole.failure));
}

void FileQueue::count(Direction direction, const IoResult& result) {
    counters_.count(direction, result);
    (direction == Direction::kRead ? reading_ : writing_).ended(result.seconds);
    counters_.read_busy_seconds = reading_.seconds();
    counters_.write_busy_seconds = writing_.seconds();
}

// Returns the request's callback, to be destroyed without a lock. An abandoned part still needs it.
FileQueue::Ended FileQueue::take_unused(Request& request) {
    return request.abandoned ? nullptr : std::exchange(request.options.ended, nullptr);
}

void FileQueue::end_of(Request& request) {
    --num_unended_;
    for (const Ticket next : std::exchange(request.next, {})) {
        const std::shared_ptr<Request> waiting = find(next);
        if (waiting && --waiting->num_before == 0) start(next, waiting);  // null if it was cancelled
    }
    changed_.notify_all();
}

}  // namespace smart_infinity
