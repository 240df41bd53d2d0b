#include "io/io_scheduler.hpp"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

namespace smart_infinity {

const char* name_of(IoClass io_class) {
    constexpr const char* kNames[kNumIoClasses] = {"awaited", "gather", "state", "write_behind", "background"};
    return kNames[static_cast<std::size_t>(io_class)];
}

class IoScheduler::Running final : public CompletionHandler {
 public:
    Running(IoScheduler& scheduler, IoClass io_class, CompletionHandler& handler)
        : scheduler_(scheduler), io_class_(io_class), handler_(handler) {}

    void completed(const IoRequest& request, const IoResult& result) override {
        const std::unique_ptr<Running> self(this);
        // The scheduler may be destroyed when the handler returns.
        scheduler_.ended(request, result, io_class_);
        handler_.completed(request, result);
    }

 private:
    IoScheduler& scheduler_;
    const IoClass io_class_;
    CompletionHandler& handler_;
};

void IoScheduler::submit(IoEngine& engine, const IoRequest& request, IoClass io_class, CompletionHandler& handler) {
    const std::lock_guard lock(mutex_);
    waiting_[static_cast<std::size_t>(io_class)].push_back(
        {&engine, request, io_class, &handler, Clock::now(), ended_bytes_});
    start_next();
}

bool IoScheduler::cancel(const CompletionHandler& handler, std::size_t tag) {
    const std::lock_guard lock(mutex_);
    const bool found = !extract(handler, tag).empty();
    start_next();  // the cancelled request may have been too large to start
    return found;
}

void IoScheduler::hasten(const CompletionHandler& handler, std::size_t tag, IoClass io_class) {
    const std::lock_guard lock(mutex_);
    for (Waiting& next : extract(handler, tag)) {
        next.io_class = std::min(next.io_class, io_class);
        waiting_[static_cast<std::size_t>(next.io_class)].push_back(next);
    }
    start_next();
}

IoWaitTable IoScheduler::waits() const {
    const std::lock_guard lock(mutex_);
    return waits_;
}

void IoScheduler::widen(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    widened_.insert(bytes);
    start_next();
}

void IoScheduler::narrow(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    if (const auto found = widened_.find(bytes); found != widened_.end()) widened_.erase(found);
}

std::size_t IoScheduler::in_flight_bytes() const {
    const std::lock_guard lock(mutex_);
    return limit();
}

// Removes and returns one request, or none.
std::deque<IoScheduler::Waiting> IoScheduler::extract(const CompletionHandler& handler, std::size_t tag) {
    for (auto& queue : waiting_) {
        const auto found = std::find_if(queue.begin(), queue.end(), [&](const Waiting& waiting) {
            return waiting.handler == &handler && waiting.request.tag == tag;
        });
        if (found == queue.end()) continue;
        const Waiting waiting = *found;
        queue.erase(found);
        return {waiting};
    }
    return {};
}

void IoScheduler::start_next() {
    for (auto& queue : waiting_) {
        while (!queue.empty()) {
            // Smaller, less urgent requests do not overtake a large one: otherwise it would never start.
            if (in_flight_ > 0 && in_flight_ + queue.front().request.bytes > limit()) return;
            const Waiting next = queue.front();
            queue.pop_front();
            start(next);
        }
    }
}

// This may run on a thread of another engine than the request's, which could not report a failure to start it.
void IoScheduler::start(const Waiting& next) noexcept {
    count_wait(next);
    in_flight_ += next.request.bytes;
    IoRequest request = next.request;
    request.since = std::max(next.since, last_return_);
    auto running = std::make_unique<Running>(*this, next.io_class, *next.handler);
    next.engine->submit(request, *running);
    (void)running.release();  // it deletes itself; no engine completes a request within submit()
}

void IoScheduler::count_wait(const Waiting& next) {
    BytesByClass bytes;
    std::transform(ended_bytes_.begin(), ended_bytes_.end(), next.ended_before.begin(), bytes.begin(), std::minus<>());
    const auto total = std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
    if (total == 0) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - next.since).count();
    for (std::size_t other = 0; other < kNumIoClasses; ++other) {
        if (bytes[other] == 0) continue;
        IoWaits& waits = waits_[static_cast<std::size_t>(next.io_class)][other];
        waits.requests += 1;
        waits.bytes += bytes[other];
        waits.seconds += seconds * static_cast<double>(bytes[other]) / static_cast<double>(total);
    }
}

void IoScheduler::ended(const IoRequest& request, const IoResult& result, IoClass io_class) {
    const std::lock_guard lock(mutex_);
    if (result.transferred != kNotReturned) last_return_ = Clock::now();
    in_flight_ -= request.bytes;
    ended_bytes_[static_cast<std::size_t>(io_class)] += request.bytes;
    start_next();
}

}  // namespace smart_infinity
