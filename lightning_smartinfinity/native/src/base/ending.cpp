#include "base/ending.hpp"

#include <atomic>

namespace smart_infinity {
namespace {

using Clock = std::chrono::steady_clock;

std::atomic<Clock::rep> last_asked = 0;  // since the clock's epoch; 0: never

}  // namespace

void ask_to_end() { last_asked = Clock::now().time_since_epoch().count(); }

void take_back_ask_to_end() { last_asked = 0; }

std::optional<Clock::time_point> asked_to_end() {
    const Clock::rep asked = last_asked;
    if (asked == 0) return std::nullopt;
    const Clock::time_point when{Clock::duration(asked)};
    return Clock::now() - when < kEndingTime ? std::optional(when) : std::nullopt;
}

}  // namespace smart_infinity
