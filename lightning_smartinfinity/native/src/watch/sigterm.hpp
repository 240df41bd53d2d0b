#pragma once

namespace smart_infinity {

// Hears SIGTERM at once. Python runs its own handlers in the main thread only, and only between two instructions: not
// while that thread waits in a collective.
//
// The handler that was there is called, too. A process has one listener at a time.
class SigtermListener {
 public:
    // Each SIGTERM writes to this eventfd, which stays open as long as the listener.
    explicit SigtermListener(int event_descriptor);
    // Puts the earlier handler back, unless somebody has set another one since.
    ~SigtermListener();
    SigtermListener(const SigtermListener&) = delete;
    SigtermListener& operator=(const SigtermListener&) = delete;

    // Steps in front of the present handler, which may have been set since the last call. A process that ignores
    // SIGTERM goes on to ignore it.
    static void step_in_front();
    // Returns whether SIGTERM came since the listener was made or told to forget.
    static bool heard();
    static void forget();
    // Returns whether no other handler was there, so that SIGTERM would have ended the process.
    static bool is_alone();
};

// Ends this process as SIGTERM does if there is no handler.
void end_by_sigterm();

}  // namespace smart_infinity
