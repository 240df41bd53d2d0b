#include "base/ending.hpp"

#include <algorithm>
#include <mutex>
#include <utility>

namespace smart_infinity {
namespace {

std::mutex mutex;
EndingClock process_clock;

}  // namespace

void EndingClock::ask(Clock::time_point now) {
    if (!is_asked(now)) {
        from_ = now;
        left_ = kFirst;
        any_abandoned_ = false;
    }
    asked_ = now;
}

std::optional<EndingLimit> EndingClock::limit(Clock::time_point now) const {
    if (!is_asked(now)) return std::nullopt;
    return EndingLimit{std::max(std::chrono::ceil<std::chrono::milliseconds>(left_), kLeast), from_};
}

void EndingClock::abandon(Clock::time_point since, Clock::time_point now) {
    if (!is_asked(now)) return;
    if (std::exchange(any_abandoned_, true)) {
        left_ -= std::min(left_, now - std::max(since, from_));
    } else {
        left_ = kLater;
    }
    from_ = now;
}

void ask_to_end() {
    const std::lock_guard lock(mutex);
    process_clock.ask(EndingClock::Clock::now());
}

void take_back_ask_to_end() {
    const std::lock_guard lock(mutex);
    process_clock.take_back();
}

std::optional<EndingLimit> ending_limit() {
    const std::lock_guard lock(mutex);
    return process_clock.limit(EndingClock::Clock::now());
}

void note_abandoned(EndingClock::Clock::time_point since) {
    const std::lock_guard lock(mutex);
    process_clock.abandon(since, EndingClock::Clock::now());
}

}  // namespace smart_infinity
