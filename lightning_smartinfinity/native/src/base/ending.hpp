#pragma once

#include <chrono>
#include <optional>

namespace smart_infinity {

// The most that a wait for a storage device has, from its begin on, or from a later moment on.
struct EndingLimit {
    std::chrono::milliseconds time;
    std::chrono::steady_clock::time_point from;
};

// Says how long a process that was asked to end, as by Ctrl-C, waits for storage devices that do not answer. It waits
// for several files, one after the other: the first wait that is abandoned has kFirst, and all later ones share kLater.
// Each has kLeast all the same, in which a device that works may answer. A wait that is answered costs the others
// nothing.
class EndingClock {
 public:
    using Clock = std::chrono::steady_clock;

    // So long after it was last asked, a process that lives on waits as ever.
    static constexpr std::chrono::seconds kLasts{10};
    static constexpr std::chrono::milliseconds kFirst{3000};
    static constexpr std::chrono::milliseconds kLater{1000};
    static constexpr std::chrono::milliseconds kLeast{100};

    void ask(Clock::time_point now);
    void take_back() { asked_.reset(); }
    // Returns the limit of waits, if the process was asked to end.
    std::optional<EndingLimit> limit(Clock::time_point now) const;
    // Notes that a wait was abandoned. Waits at the same time count once.
    void abandon(Clock::time_point since, Clock::time_point now);

 private:
    bool is_asked(Clock::time_point now) const { return asked_ && now - *asked_ < kLasts; }

    std::optional<Clock::time_point> asked_;
    Clock::time_point from_;
    Clock::duration left_{};
    bool any_abandoned_ = false;
};

// The process has one clock. These functions ask it, from any thread.

// Says that the process is to end.
void ask_to_end();
// Takes it back, as a device has answered since: requests have their own time again.
void take_back_ask_to_end();
std::optional<EndingLimit> ending_limit();
void note_abandoned(EndingClock::Clock::time_point since);

}  // namespace smart_infinity
