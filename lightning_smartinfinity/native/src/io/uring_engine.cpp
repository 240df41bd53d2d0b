#include "io/uring_engine.hpp"

#include <cerrno>

#include "base/system_error.hpp"

#ifndef SMART_INFINITY_LIBURING

namespace smart_infinity {

std::optional<std::string> uring_unavailable() { return "this build found no liburing"; }

std::unique_ptr<IoEngine> make_uring_engine(const std::vector<StateFile>&, const MemoryRange&) {
    throw SystemError(ENOSYS, "io_uring: this build found no liburing");
}

}  // namespace smart_infinity

#else

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <thread>

#include "base/stopwatch.hpp"
#include "base/worker_pool.hpp"
#include "io/uring_ring.hpp"

namespace smart_infinity {
namespace {

constexpr std::size_t kMaxInFlight = 127;        // requests in flight
constexpr unsigned kEntries = kMaxInFlight + 1;  // one for each of them, and one for the wake-up
constexpr double kLongestWait = 2e-4;            // seconds that queued requests may wait for handlers
constexpr int kMaxAttempts = 10'000;             // a millisecond apart
constexpr std::uint64_t kWakeUp = ~std::uint64_t{0};

class UringEngine final : public IoEngine {
 public:
    UringEngine(const std::vector<StateFile>& files, const MemoryRange& memory)
        : memory_(memory), wake_(0), in_flight_(kMaxInFlight) {
        for (const StateFile& file : files) descriptors_.push_back(file.descriptor());
        for (std::size_t index = kMaxInFlight; index > 0; --index) free_.push_back(index - 1);
        const BlockedSignals blocked;
        thread_ = std::thread([this] { run(); });
        pthread_setname_np(thread_.native_handle(), "smart-inf-ring");
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return started_; });
        lock.unlock();
        if (!set_up_error_) return;
        thread_.join();
        throw SystemError(*set_up_error_);
    }

    ~UringEngine() override {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
            wake_up();
        }
        thread_.join();
    }

    void submit(const IoRequest& request, CompletionHandler& handler) override { push(Item{request, &handler}); }

    IoUsage usage() const override {
        IoUsage usage;
        {
            const std::lock_guard lock(mutex_);
            usage = usage_;
        }
        usage.cpu_seconds = cpu_seconds(const_cast<std::thread&>(thread_));
        return usage;
    }

    IoEngineKind kind() const override { return IoEngineKind::kUring; }

 private:
    struct Item {
        IoRequest request;
        CompletionHandler* handler;
        int attempts = 0;
    };
    struct InFlight {
        Item item;
        Stopwatch stopwatch;
    };
    struct Completion {
        std::size_t index;
        std::int64_t result;
    };

    void push(const Item& item) {
        const std::lock_guard lock(mutex_);
        queue_.push_back(item);
        if (asleep_) wake_up();
    }

    void run() {
        std::optional<UringRing> ring;
        try {
            ring.emplace(kEntries);
            ring->probe();
        } catch (const SystemError& error) {
            set_up_error_ = error;
            ring.reset();
        }
        if (ring) prepare(*ring);
        {
            const std::lock_guard lock(mutex_);
            started_ = true;
        }
        changed_.notify_all();
        if (ring) work();
    }

    void prepare(UringRing& ring) {
        ring_ = ring.get();
        files_registered_ =
            !descriptors_.empty() &&
            io_uring_register_files(ring_, descriptors_.data(), static_cast<unsigned>(descriptors_.size())) == 0;
        register_memory();
        arm_wake_up();
    }

    // Registers all of the memory or none. An unprivileged process may lock only little memory; requests work without
    // it.
    void register_memory() {
        if (memory_.part_bytes == 0) return;
        std::vector<iovec> parts;
        for (std::size_t begin = 0; begin < memory_.bytes; begin += memory_.part_bytes) {
            parts.push_back({memory_.data + begin, std::min(memory_.part_bytes, memory_.bytes - begin)});
        }
        const int result = io_uring_register_buffers(ring_, parts.data(), static_cast<unsigned>(parts.size()));
        memory_registered_ = result == 0;
        const std::lock_guard lock(mutex_);
        if (memory_registered_) usage_.registered_bytes = memory_.bytes;
        usage_.registration_errno = -result;
    }

    void work() {
        while (prepare_queued()) {
            const int result = io_uring_submit_and_wait(ring_, 1);
            // If the kernel is short of memory or was interrupted, unsubmitted entries stay queued in the ring.
            if (result < 0 && result != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            reap();
        }
    }

    // Prepares entries for queued requests. Returns whether there is anything to wait for.
    bool prepare_queued() {
        const std::lock_guard lock(mutex_);
        prepare_entries();
        asleep_ = true;
        ++usage_.system_calls;
        return !closing_ || !queue_.empty() || free_.size() < kMaxInFlight;
    }

    // The caller holds the mutex. Returns whether any entry was prepared.
    bool prepare_entries() {
        bool any = false;
        for (; !queue_.empty() && !free_.empty(); any = true) {
            prepare_entry(queue_.front());
            queue_.pop_front();
        }
        return any;
    }

    void prepare_entry(const Item& item) {
        const std::size_t index = free_.back();
        free_.pop_back();
        in_flight_[index] = InFlight{item, Stopwatch{}};
        const IoRequest& request = item.request;
        io_uring_sqe* const entry = io_uring_get_sqe(ring_);  // not null: each request in flight has an entry
        const auto bytes = static_cast<unsigned>(std::min(request.bytes, kMaxBytes));
        const int part = registered_part(request);
        const int file = registered_file(request.descriptor);
        const int descriptor = file >= 0 ? file : request.descriptor;
        const bool read = request.direction == Direction::kRead;
        if (part >= 0 && read) {
            io_uring_prep_read_fixed(entry, descriptor, request.data, bytes, request.offset, part);
        } else if (part >= 0) {
            io_uring_prep_write_fixed(entry, descriptor, request.data, bytes, request.offset, part);
        } else if (read) {
            io_uring_prep_read(entry, descriptor, request.data, bytes, request.offset);
        } else {
            io_uring_prep_write(entry, descriptor, request.data, bytes, request.offset);
        }
        if (file >= 0) io_uring_sqe_set_flags(entry, IOSQE_FIXED_FILE);
        io_uring_sqe_set_data64(entry, index);
    }

    // Returns the registered part that contains all of the request's memory, or -1.
    int registered_part(const IoRequest& request) const {
        if (!memory_registered_ || request.data < memory_.data) return -1;
        const auto begin = static_cast<std::size_t>(request.data - memory_.data);
        if (begin >= memory_.bytes) return -1;
        const std::size_t part = begin / memory_.part_bytes;
        const std::size_t end = std::min(memory_.bytes, (part + 1) * memory_.part_bytes);
        return request.bytes <= end - begin ? static_cast<int>(part) : -1;
    }

    int registered_file(int descriptor) const {
        if (!files_registered_) return -1;
        const auto found = std::find(descriptors_.begin(), descriptors_.end(), descriptor);
        return found == descriptors_.end() ? -1 : static_cast<int>(found - descriptors_.begin());
    }

    void arm_wake_up() {
        io_uring_sqe* const entry = io_uring_get_sqe(ring_);
        io_uring_prep_read(entry, wake_.get(), &wake_value_, sizeof wake_value_, 0);
        io_uring_sqe_set_data64(entry, kWakeUp);
    }

    // The caller holds the mutex.
    void wake_up() {
        asleep_ = false;
        const std::uint64_t one = 1;
        ++usage_.system_calls;
        while (::write(wake_.get(), &one, sizeof one) < 0 && errno == EINTR) {
        }
    }

    void reap() {
        completions_.clear();
        unsigned head = 0;
        unsigned count = 0;
        bool woken = false;
        io_uring_cqe* completion = nullptr;
        io_uring_for_each_cqe(ring_, head, completion) {
            ++count;
            if (completion->user_data == kWakeUp) {
                woken = true;
            } else {
                completions_.push_back({static_cast<std::size_t>(completion->user_data), completion->res});
            }
        }
        io_uring_cq_advance(ring_, count);
        if (!stay_awake()) woken = false;
        if (woken) arm_wake_up();
        const Stopwatch since_reaped;
        double submitted = 0;
        for (const Completion& each : completions_) {
            complete(each);
            // A handler may compute, such as a checksum. Requests queued meanwhile are submitted to the disk.
            if (since_reaped.seconds() - submitted < kLongestWait) continue;
            submit_queued();
            submitted = since_reaped.seconds();
        }
    }

    // The caller checks the queue again before it sleeps.
    void submit_queued() {
        {
            const std::lock_guard lock(mutex_);
            if (!prepare_entries()) return;
            ++usage_.system_calls;
        }
        // Entries that the kernel does not accept now stay queued in the ring.
        (void)io_uring_submit(ring_);
    }

    // Marks the thread as awake. Returns whether later requests may have to wake it again.
    bool stay_awake() {
        const std::lock_guard lock(mutex_);
        asleep_ = false;
        return !closing_;
    }

    void complete(const Completion& completion) {
        const InFlight ended = in_flight_[completion.index];
        free_.push_back(completion.index);
        // The kernel could not accept the request now. This is not a failure: the request is submitted again.
        if (completion.result == -EAGAIN && ended.item.attempts < kMaxAttempts) return retry(ended.item);
        ended.item.handler->completed(ended.item.request, IoResult{completion.result, ended.stopwatch.seconds()});
    }

    void retry(Item item) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        ++item.attempts;
        push(item);
    }

    static constexpr std::size_t kMaxBytes = std::size_t{1} << 30;  // in one entry, whose length has 32 bits

    const MemoryRange memory_;
    std::vector<int> descriptors_;
    const EventDescriptor wake_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Item> queue_;
    IoUsage usage_;
    bool started_ = false;
    bool asleep_ = false;  // from the thread's last check of the queue until it wakes up
    bool closing_ = false;

    // The ring's thread owns these.
    io_uring* ring_ = nullptr;
    std::optional<SystemError> set_up_error_;
    bool files_registered_ = false;
    bool memory_registered_ = false;
    std::uint64_t wake_value_ = 0;
    std::vector<InFlight> in_flight_;
    std::vector<std::size_t> free_;
    std::vector<Completion> completions_;

    std::thread thread_;
};

}  // namespace

std::optional<std::string> uring_unavailable() {
    try {
        UringRing(kEntries).probe();
        return std::nullopt;
    } catch (const SystemError& error) {
        return "the system refuses io_uring (" + error.code().message() + ")";
    }
}

std::unique_ptr<IoEngine> make_uring_engine(const std::vector<StateFile>& files, const MemoryRange& memory) {
    return std::make_unique<UringEngine>(files, memory);
}

}  // namespace smart_infinity

#endif
