#pragma once

#include <chrono>
#include <optional>

namespace smart_infinity {

// Says that the process is to end, as after Ctrl-C: from now on, for kEndingTime, nothing waits long for a storage
// device that does not answer. May be called from any thread, and again.
void ask_to_end();

// Takes it back, as a device has answered since: requests have their own time again.
void take_back_ask_to_end();

constexpr std::chrono::seconds kEndingTime{10};
// Longest time of a request meanwhile. A device that works answers sooner.
constexpr std::chrono::milliseconds kEndingTimeout{3000};

// Returns when ask_to_end() was last called, if that is less than kEndingTime ago.
std::optional<std::chrono::steady_clock::time_point> asked_to_end();

}  // namespace smart_infinity
