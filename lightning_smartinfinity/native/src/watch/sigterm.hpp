#pragma once

namespace smart_infinity {

// Receives SIGTERM at once. Python runs its own handlers only in the main thread, and only between two instructions:
// not while that thread waits in a collective.
//
// The earlier handler is called, too. A process has one listener at a time.
class SigtermListener {
 public:
    // Each SIGTERM writes to this eventfd, which must stay open as long as the listener.
    explicit SigtermListener(int event_descriptor);
    // Restores the earlier handler, unless another one has been set since.
    ~SigtermListener();
    SigtermListener(const SigtermListener&) = delete;
    SigtermListener& operator=(const SigtermListener&) = delete;

    // Installs itself before the present handler, which may have been set since the last call. A process that ignores
    // SIGTERM continues to ignore it.
    static void step_in_front();
    // Returns whether SIGTERM was received since the listener was created or forget() was called.
    static bool heard();
    static void forget();
    // Returns whether there was no other handler, so that SIGTERM would have ended the process.
    static bool is_alone();
};

// Ends this process as SIGTERM does without a handler.
void end_by_sigterm();

}  // namespace smart_infinity
