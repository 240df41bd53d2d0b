#include "testing/hold.hpp"

#include <future>

namespace smart_infinity {

bool Hold::try_hold(const IoRequest& request, std::function<void()> begin) {
    const std::lock_guard lock(mutex_);
    if (released_ || request.direction != direction_) return false;
    const std::uint64_t number = next_++;
    if (number < first_ || number >= last_) return false;
    held_.push_back(std::move(begin));
    return true;
}

std::size_t Hold::count() const {
    const std::lock_guard lock(mutex_);
    return held_.size();
}

void Hold::release() {
    std::unique_lock lock(mutex_);
    released_ = true;
    const std::vector<std::function<void()>> held = std::exchange(held_, {});
    lock.unlock();
    for (const auto& begin : held) begin();
}

void wait_for(Hold& hold, const IoRequest& request) {
    const auto released = std::make_shared<std::promise<void>>();
    if (hold.try_hold(request, [released] { released->set_value(); })) released->get_future().wait();
}

void HoldingEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    const auto begin = [this, request, &handler] { inner_->submit(request, handler); };
    if (!hold_->try_hold(request, begin)) begin();
}

}  // namespace smart_infinity
