#include "io/file_queue.hpp"

#include <algorithm>
#include <condition_variable>
#include <stdexcept>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/abandoned_call.hpp"
#include "base/buffer.hpp"
#include "base/stopwatch.hpp"
#include "io/deadline_engine.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {
namespace {

// A request is cut into parts of this size, which run concurrently: one thread alone does not saturate a disk.
constexpr std::size_t kPartBytes = std::size_t{4} << 20;

void require(bool condition, const std::string& problem) {
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
                     std::optional<Deadline> deadline)
    : deadline_(std::move(deadline)), engine_(make_engine({io_engine, io_threads, {}, memory})) {}

FileQueue::~FileQueue() {
    close();
    if (!busy()) return;
    struct Used {
        std::vector<StateFile> files;
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
                                    std::size_t bytes) {
    require(bytes > 0, "no bytes");
    const bool aligned = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0 &&
                         reinterpret_cast<std::uintptr_t>(data) % kBlockBytes == 0;
    require(aligned || file.access() == Access::kBuffered, "direct I/O wants whole blocks of 4096 bytes");
    const int descriptor = file.descriptor();
    const std::lock_guard lock(mutex_);
    require(!closed_, "it is closed");
    const Ticket ticket = next_ticket_++;
    requests_[ticket].parts_left = (bytes + kPartBytes - 1) / kPartBytes;
    for (std::size_t begin = 0; begin < bytes; begin += kPartBytes) {
        const IoRequest part{direction,  descriptor, offset + begin, data + begin, std::min(kPartBytes, bytes - begin),
                             next_tag_++};
        parts_.emplace(part.tag, Part{file, Transfer(part, file.access()), ticket});
        engine_->submit(part, *this);
    }
    return ticket;
}

std::optional<Failure> FileQueue::wait(Ticket ticket, const Poll& poll) {
    const Stopwatch stopwatch;
    std::unique_lock lock(mutex_);
    require(ticket < next_ticket_, "there is no ticket " + std::to_string(ticket));
    const auto ended = [&] {
        const auto request = requests_.find(ticket);
        return request == requests_.end() || request->second.parts_left == 0;
    };
    while (!changed_.wait_for(lock, kPollInterval, ended)) {
        lock.unlock();
        poll();
        lock.lock();
    }
    // The last poll runs while the ticket is open: if it throws, the request's failure can still be waited for.
    lock.unlock();
    poll();
    lock.lock();
    counters_.wait_seconds += stopwatch.seconds();
    const auto node = requests_.extract(ticket);
    return node.empty() ? std::nullopt : std::move(node.mapped().failure);
}

Counters FileQueue::report() const {
    const std::lock_guard lock(mutex_);
    return with_usage(counters_, engine_->usage());
}

IoEngineKind FileQueue::io_engine() const {
    const std::lock_guard lock(mutex_);
    return engine_->kind();
}

bool FileQueue::busy() const { return watch_ != nullptr && watch_->any_abandoned(); }

void FileQueue::close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.wait(lock, [&] { return parts_.empty(); });
}

std::optional<Failure> FileQueue::failure_of(const Part& part, Transfer::Progress progress,
                                             const IoResult& result) const {
    if (progress == Transfer::Progress::kDone) return std::nullopt;
    if (progress == Transfer::Progress::kNotReturned) {
        return not_returned(part.transfer.rest(), part.file.path(), result, deadline_->kind);
    }
    return smart_infinity::failure_of(part.transfer, progress, part.file.path());
}

// Runs on a thread of the engine, or of the deadline engine around it.
void FileQueue::completed(const IoRequest& request, const IoResult& result) {
    const std::lock_guard lock(mutex_);
    Part& part = parts_.at(request.tag);
    counters_.count(request.direction, result);
    const Transfer::Progress progress = part.transfer.advance(result);
    if (progress == Transfer::Progress::kAgain) return engine_->submit(part.transfer.rest(), *this);
    Request& whole = requests_.at(part.ticket);
    if (!whole.failure) whole.failure = failure_of(part, progress, result);
    const bool refused = result.seconds == 0;
    if (progress == Transfer::Progress::kNotReturned && !refused) abandoned_.push_back(part.file);
    --whole.parts_left;
    parts_.erase(request.tag);
    changed_.notify_all();
}

}  // namespace smart_infinity
