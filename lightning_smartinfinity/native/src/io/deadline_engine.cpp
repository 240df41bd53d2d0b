#include "io/deadline_engine.hpp"

#include <algorithm>
#include <utility>

#include "base/ending.hpp"
#include "base/worker_pool.hpp"

namespace smart_infinity {
namespace {

using std::chrono::milliseconds;

// Time between checks. Deadlines are met exactly; only progress and ask_to_end() are noticed up to this much late.
constexpr milliseconds kBetweenLooks{250};

// If a check is late by this factor, the process was paused.
constexpr int kPause = 4;

// The present time limit of a request, and the earliest start of this time.
struct Limit {
    explicit Limit(milliseconds timeout) : time(timeout) {
        const auto ending = ending_limit();
        if (!ending || timeout <= ending->time) return;
        time = ending->time;
        from = ending->from;
    }

    milliseconds time;
    std::chrono::steady_clock::time_point from;
};

}  // namespace

DeadlineEngine::DeadlineEngine(std::unique_ptr<IoEngine> inner, milliseconds timeout)
    : timeout_(timeout),
      between_looks_(std::clamp(timeout / 4, milliseconds(1), kBetweenLooks)),
      inner_(std::move(inner)) {
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
        const bool refuses = !abandoned_.empty();
        if (refuses) {
            refused_.push_back({request, &handler, milliseconds(0)});
        } else {
            waiting_.insert_or_assign(request.tag, Waiting{request, &handler, next_number_++, since(request)});
        }
        if (asleep_ || refuses) {
            asleep_ = false;
            changed_.notify_all();
        }
        if (refuses) return;
    }
    inner_->submit(request, *this);
}

// Returns the start of a request's time. Even a request that waited long behind requests that did not return gets some
// time to show that its own file answers.
DeadlineEngine::Clock::time_point DeadlineEngine::since(const IoRequest& request) const {
    const auto now = Clock::now();
    if (request.since == Clock::time_point()) return now;
    return std::max(request.since, now - timeout_ + std::min(timeout_, EndingClock::kFirst));
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
    const Waiting returned = waiting_.extract(request.tag).mapped();
    earliest_returned_ = std::min(earliest_returned_, returned.number);
    lock.unlock();
    returned.handler->completed(request, result);
}

void DeadlineEngine::watch() {
    std::unique_lock lock(mutex_);
    for (;;) {
        rest(lock);
        // Refused requests that were submitted before the destructor call are still completed.
        if (closing_ && refused_.empty()) return;
        note_pause();
        note_progress();
        const std::vector<Late> late = take_late();
        if (late.empty()) continue;
        lock.unlock();
        for (const Late& each : late) {
            each.handler->completed(each.request, {kNotReturned, std::chrono::duration<double>(each.limit).count()});
        }
        lock.lock();
    }
}

// Waits for the next check. Without requests, it sleeps until one is submitted.
void DeadlineEngine::rest(std::unique_lock<std::mutex>& lock) {
    const bool idle = waiting_.empty();
    changed_.wait_until(lock, next_look(), [this] { return closing_ || !refused_.empty(); });
    if (closing_ || !refused_.empty() || !idle || !waiting_.empty()) return;
    earliest_returned_ = kNone;  // no request was waiting meanwhile
    asleep_ = true;
    changed_.wait(lock, [this] { return closing_ || !asleep_; });
    asleep_ = false;
    looked_at_ = Clock::now();  // this sleep is not a pause of the process
}

DeadlineEngine::Clock::time_point DeadlineEngine::next_look() const {
    const Limit limit(timeout_);
    auto next = Clock::now() + between_looks_;
    for (const auto& [tag, each] : waiting_) next = std::min(next, std::max(each.since, limit.from) + limit.time);
    return next;
}

// While the process or the machine was suspended, requests did not really wait: they all get their full time again.
void DeadlineEngine::note_pause() {
    const auto now = Clock::now();
    if (now - std::exchange(looked_at_, now) <= kPause * between_looks_) return;
    for (auto& [tag, each] : waiting_) each.since = now;
}

void DeadlineEngine::note_progress() {
    if (earliest_returned_ == kNone) return;
    const auto now = Clock::now();
    for (auto& [tag, each] : waiting_) {
        if (each.number > earliest_returned_) each.since = now;
    }
    earliest_returned_ = kNone;
}

std::vector<DeadlineEngine::Late> DeadlineEngine::take_late() {
    std::vector<Late> late = std::exchange(refused_, {});
    const Limit limit(timeout_);
    const auto now = Clock::now();
    for (auto next = waiting_.begin(); next != waiting_.end();) {
        const Waiting& each = next->second;
        if (std::max(each.since, limit.from) + limit.time > now) {
            ++next;
            continue;
        }
        note_abandoned(each.since);
        late.push_back({each.request, each.handler, limit.time});
        abandoned_.try_emplace(next->first, each.request);
        next = waiting_.erase(next);
    }
    return late;
}

}  // namespace smart_infinity
