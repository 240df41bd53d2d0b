#pragma once

#include <chrono>
#include <optional>

namespace smart_infinity {

// The time limit of a wait for a storage device, counted from the wait's start or from `from`, whichever is later.
struct EndingLimit {
    std::chrono::milliseconds time;
    std::chrono::steady_clock::time_point from;
};

// Limits how long a process that was asked to end, as by Ctrl-C, waits for storage devices that do not answer. The
// process may wait for several files in turn: the first abandoned wait may take kFirst, and all later ones share
// kLater. Each may take at least kLeast, in which a working device can answer. A wait that is answered does not shorten
// the others.
class EndingClock {
 public:
    using Clock = std::chrono::steady_clock;

    // The limits apply for this time after the last request to end. A process that still lives then waits normally
    // again.
    static constexpr std::chrono::seconds kLasts{10};
    static constexpr std::chrono::milliseconds kFirst{3000};
    static constexpr std::chrono::milliseconds kLater{1000};
    static constexpr std::chrono::milliseconds kLeast{100};

    void ask(Clock::time_point now);
    void take_back() { asked_.reset(); }
    // Returns the limit of a wait, or nothing if the process was not asked to end.
    std::optional<EndingLimit> limit(Clock::time_point now) const;
    // Records an abandoned wait. Waits that overlap in time count once.
    void abandon(Clock::time_point since, Clock::time_point now);

 private:
    bool is_asked(Clock::time_point now) const { return asked_ && now - *asked_ < kLasts; }

    std::optional<Clock::time_point> asked_;
    Clock::time_point from_;
    Clock::duration left_{};
    bool any_abandoned_ = false;
};

// The process has one clock. These functions use it, from any thread.

// Records that the process is to end.
void ask_to_end();
// Revokes the request to end, because a device has answered: later waits get their normal time.
void take_back_ask_to_end();
std::optional<EndingLimit> ending_limit();
void note_abandoned(EndingClock::Clock::time_point since);

}  // namespace smart_infinity
