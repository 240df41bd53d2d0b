#include "io/file_queue.hpp"

#include <algorithm>
#include <condition_variable>
#include <stdexcept>
#include <system_error>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/buffer.hpp"
#include "base/still_out.hpp"
#include "base/stopwatch.hpp"
#include "io/deadline_engine.hpp"
#include "io/transfer.hpp"

namespace smart_infinity {
namespace {

// A request is cut into parts of so many bytes, which run side by side: one thread alone does not fill a disk.
constexpr std::size_t kPartBytes = std::size_t{4} << 20;

void require(bool condition, const std::string& problem) {
    if (!condition) throw std::invalid_argument("FileQueue: " + problem);
}

Failure not_returned(const IoRequest& rest, const std::string& path, std::chrono::milliseconds timeout) {
    const std::string verb = rest.direction == Direction::kRead ? "reading " : "writing ";
    const std::string where = std::to_string(rest.bytes) + " bytes at offset " + std::to_string(rest.offset);
    const std::string message =
        verb + where + " of " + path + " did not return within " + std::to_string(timeout.count()) + " ms";
    return Failure{FailureKind::kDevice, path, rest.offset, 0, 0, message};
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

// Completions drive it, as in a TransferLoop: the mutex is never held during I/O.
class FileQueue::Loop final : private CompletionHandler {
 public:
    Loop(const IoOptions& options, std::optional<Deadline> deadline)
        : deadline_(std::move(deadline)), engine_(make_engine(options)) {}
    ~Loop() {
        close();
        if (!busy()) return;
        struct Used {
            std::vector<StateFile> files;
            std::shared_ptr<void> memory;
            std::unique_ptr<IoEngine> engine;
        };
        keep_for_ever(std::make_shared<Used>(Used{std::move(late_), std::move(deadline_->used), std::move(engine_)}));
    }

    Ticket submit(const IoRequest& whole, const StateFile& file) {
        const std::lock_guard lock(mutex_);
        require(!closed_, "it is closed");
        const Ticket ticket = next_ticket_++;
        requests_[ticket].parts_left = (whole.bytes + kPartBytes - 1) / kPartBytes;
        for (std::size_t begin = 0; begin < whole.bytes; begin += kPartBytes) {
            IoRequest request = whole;
            request.offset += begin;
            request.data += begin;
            request.bytes = std::min(kPartBytes, whole.bytes - begin);
            request.tag = next_tag_++;
            parts_.emplace(request.tag, Part{file, Transfer(request, file.access()), ticket});
            engine_->submit(request, *this);
        }
        return ticket;
    }

    std::optional<Failure> wait(Ticket ticket, const Poll& poll) {
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
        // Once more, while the ticket is open: raised later, a failure would be lost.
        lock.unlock();
        poll();
        lock.lock();
        counters_.wait_seconds += stopwatch.seconds();
        const auto node = requests_.extract(ticket);
        return node.empty() ? std::nullopt : std::move(node.mapped().failure);
    }

    Counters report() const {
        const std::lock_guard lock(mutex_);
        return with_usage(counters_, engine_->usage());
    }

    IoEngineKind io_engine() const {
        const std::lock_guard lock(mutex_);
        return engine_->kind();
    }

    bool busy() const { return watch_ != nullptr && watch_->any_out(); }

    void close() {
        std::unique_lock lock(mutex_);
        closed_ = true;
        changed_.wait(lock, [&] { return parts_.empty(); });
    }

    void decorate_engine(const Decorate& decorate) {
        const std::lock_guard lock(mutex_);
        require(!closed_, "it is closed");
        require(parts_.empty(), "something is in flight");
        if (watch_ != nullptr) return watch_->decorate(decorate);
        engine_ = decorate(std::move(engine_));
    }

 private:
    struct Part {
        StateFile file;  // keeps its descriptor open
        Transfer transfer;
        Ticket ticket;
    };

    struct Request {
        std::size_t parts_left = 0;
        std::optional<Failure> failure;  // the first
    };

    std::unique_ptr<IoEngine> make_engine(const IoOptions& options) {
        auto engine = make_io_engine(options);
        if (!deadline_) return engine;
        auto watch = std::make_unique<DeadlineEngine>(std::move(engine), deadline_->timeout);
        watch_ = watch.get();
        return watch;
    }

    Failure failure_of(const Part& part, Transfer::Progress progress) const {
        if (progress == Transfer::Progress::kNotReturned) {
            return not_returned(part.transfer.rest(), part.file.path(), deadline_->timeout);
        }
        return smart_infinity::failure_of(part.transfer, progress, part.file.path());
    }

    // On a thread of the engine, or of the one that watches it.
    void completed(const IoRequest& request, const IoResult& result) override {
        const std::lock_guard lock(mutex_);
        Part& part = parts_.at(request.tag);
        counters_.count(request.direction, result);
        const Transfer::Progress progress = part.transfer.advance(result);
        if (progress == Transfer::Progress::kAgain) return engine_->submit(part.transfer.rest(), *this);
        Request& whole = requests_.at(part.ticket);
        if (progress != Transfer::Progress::kDone && !whole.failure) {
            whole.failure = failure_of(part, progress);
        }
        if (progress == Transfer::Progress::kNotReturned) late_.push_back(part.file);
        --whole.parts_left;
        parts_.erase(request.tag);
        changed_.notify_all();
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<Ticket, Request> requests_;  // not waited for yet
    std::unordered_map<std::size_t, Part> parts_;   // in flight, by tag
    Ticket next_ticket_ = 0;
    std::size_t next_tag_ = 0;
    Counters counters_;
    bool closed_ = false;
    std::vector<StateFile> late_;  // of requests that were given up
    std::optional<Deadline> deadline_;
    DeadlineEngine* watch_ = nullptr;   // the engine, if there is a deadline
    std::unique_ptr<IoEngine> engine_;  // last: its destructor waits for threads that use all of the above
};

FileQueue::FileQueue(std::size_t io_threads, std::optional<IoEngineKind> io_engine, MemoryRange memory,
                     std::optional<Deadline> deadline)
    : loop_("FileQueue", make_loop({io_engine, io_threads, {}, memory}, std::move(deadline))) {}

FileQueue::~FileQueue() = default;

std::shared_ptr<FileQueue::Loop> FileQueue::make_loop(const IoOptions& options, std::optional<Deadline> deadline) {
    require(options.threads >= 1 && options.threads <= 1024, "io_threads must be in [1, 1024]");
    return std::make_shared<Loop>(options, std::move(deadline));
}

FileQueue::Ticket FileQueue::submit(Direction direction, const StateFile& file, std::uint64_t offset, std::byte* data,
                                    std::size_t bytes) {
    require(bytes > 0, "no bytes");
    const bool aligned = offset % kBlockBytes == 0 && bytes % kBlockBytes == 0 &&
                         reinterpret_cast<std::uintptr_t>(data) % kBlockBytes == 0;
    require(aligned || file.access() == Access::kBuffered, "direct I/O wants whole blocks of 4096 bytes");
    return loop_.get()->submit(IoRequest{direction, file.descriptor(), offset, data, bytes, 0}, file);
}

std::optional<Failure> FileQueue::wait(Ticket ticket, const Poll& poll) { return loop_.get()->wait(ticket, poll); }

Counters FileQueue::counters() const { return loop_.report(); }

IoEngineKind FileQueue::io_engine() const { return loop_.get()->io_engine(); }

bool FileQueue::busy() const { return loop_.get()->busy(); }

void FileQueue::close() { loop_.close(); }

void FileQueue::decorate_engine(const Decorate& decorate) { loop_.get()->decorate_engine(decorate); }

}  // namespace smart_infinity
