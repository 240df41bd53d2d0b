#include "throttle.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace smart_infinity {

ThrottledEngine::ThrottledEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<const Throttle> throttle)
    : throttle_(std::move(throttle)),
      slow_("smart-inf-slow", 1, [this](const Done& done) { pass_on(done); }),
      inner_(std::move(inner)) {}

void ThrottledEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    if (request.descriptor != throttle_->descriptor) return inner_->submit(request, handler);
    {
        const std::lock_guard lock(mutex_);
        pending_.insert_or_assign(request.tag, Pending{&handler, Stopwatch{}});
    }
    inner_->submit(request, *this);
}

void ThrottledEngine::pass_on(const Done& done) {
    const double rate = throttle_->bytes_per_second;
    const auto bytes = static_cast<double>(std::max<std::int64_t>(done.result.transferred, 0));
    if (rate > 0) std::this_thread::sleep_for(std::chrono::duration<double>(bytes / rate));
    std::unique_lock lock(mutex_);
    const Pending pending = pending_.at(done.request.tag);
    lock.unlock();
    pending.handler->completed(done.request, {done.result.transferred, pending.stopwatch.seconds()});
}

}  // namespace smart_infinity
