#include "testing/throttle.hpp"

#include <algorithm>
#include <thread>
#include <utility>

namespace smart_infinity {

Throttle::Clock::time_point Throttle::take_turn(std::size_t bytes) {
    const double rate = bytes_per_second;
    if (rate <= 0) return {};
    const std::chrono::duration<double> turn(static_cast<double>(bytes) / rate);
    const std::lock_guard lock(mutex_);
    end_of_turns_ = std::max(end_of_turns_, Clock::now()) + std::chrono::duration_cast<Clock::duration>(turn);
    return end_of_turns_;
}

ThrottledEngine::ThrottledEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Throttle> throttle,
                                 std::set<int> descriptors)
    : throttle_(std::move(throttle)),
      descriptors_(std::move(descriptors)),
      slow_("smart-inf-slow", 1, [this](const Done& done) { pass_on(done); }),
      inner_(std::move(inner)) {}

void ThrottledEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    if (!descriptors_.contains(request.descriptor)) return inner_->submit(request, handler);
    {
        const std::lock_guard lock(mutex_);
        pending_.insert_or_assign(request.tag, Pending{&handler, Stopwatch{}, throttle_->take_turn(request.bytes)});
    }
    inner_->submit(request, *this);
}

void ThrottledEngine::pass_on(const Done& done) {
    std::unique_lock lock(mutex_);
    const Pending pending = pending_.at(done.request.tag);
    lock.unlock();
    std::this_thread::sleep_until(pending.end_of_turn);
    pending.handler->completed(done.request, {done.result.transferred, pending.stopwatch.seconds()});
}

}  // namespace smart_infinity
