#include "io/deadline_engine.hpp"

#include <algorithm>
#include <utility>

#include "base/worker_pool.hpp"

namespace smart_infinity {

DeadlineEngine::DeadlineEngine(std::unique_ptr<IoEngine> inner, std::chrono::milliseconds timeout)
    : timeout_(timeout), inner_(std::move(inner)) {
    const BlockedSignals blocked;
    watch_ = std::thread([this] { watch(); });
    pthread_setname_np(watch_.native_handle(), "smart-inf-watch");
}

DeadlineEngine::~DeadlineEngine() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    changed_.notify_all();
    watch_.join();
}

void DeadlineEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    {
        const std::lock_guard lock(mutex_);
        waiting_.insert_or_assign(request.tag, Waiting{request, &handler, Clock::now() + timeout_});
        // Deadlines are in the order of submission: if others wait, the watch thread already waits for an earlier one.
        if (waiting_.size() == 1) changed_.notify_all();
    }
    inner_->submit(request, *this);
}

bool DeadlineEngine::any_abandoned() const {
    const std::lock_guard lock(mutex_);
    return !abandoned_.empty();
}

std::vector<IoRequest> DeadlineEngine::abandoned_writes() const {
    const std::lock_guard lock(mutex_);
    std::vector<IoRequest> writes;
    for (const auto& [tag, abandoned] : abandoned_) {
        if (abandoned.request.direction == Direction::kWrite) writes.push_back(abandoned.request);
    }
    return writes;
}

void DeadlineEngine::completed(const IoRequest& request, const IoResult& result) {
    std::unique_lock lock(mutex_);
    if (abandoned_.erase(request.tag) > 0) return;
    CompletionHandler* const handler = waiting_.extract(request.tag).mapped().handler;
    lock.unlock();
    handler->completed(request, result);
}

void DeadlineEngine::watch() {
    for (;;) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
        if (closing_) return;
        const auto earliest = std::min_element(waiting_.begin(), waiting_.end(), [](const auto& a, const auto& b) {
                                  return a.second.deadline < b.second.deadline;
                              })->second.deadline;
        changed_.wait_until(lock, earliest, [this] { return closing_; });
        const std::vector<Waiting> overdue = abandon_overdue();
        lock.unlock();
        const double seconds = std::chrono::duration<double>(timeout_).count();
        for (const Waiting& waiting : overdue) {
            waiting.handler->completed(waiting.request, {kNotReturned, seconds});
        }
    }
}

std::vector<DeadlineEngine::Waiting> DeadlineEngine::abandon_overdue() {
    std::vector<Waiting> overdue;
    const auto now = Clock::now();
    for (auto next = waiting_.begin(); next != waiting_.end();) {
        if (next->second.deadline > now) {
            ++next;
            continue;
        }
        overdue.push_back(next->second);
        abandoned_.try_emplace(next->first, next->second.request);
        next = waiting_.erase(next);
    }
    return overdue;
}

}  // namespace smart_infinity
