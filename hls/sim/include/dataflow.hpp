// The processes of one call of a top, with a watchdog: if every remaining process waits for a stream, none will ever
// continue. This is detected when it happens, without a clock.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>

namespace sim {

struct Deadlock : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Returns the name of the process that the calling thread runs.
inline std::string& process_name() {
    thread_local std::string name = "the top";
    return name;
}

class Dataflow {
 public:
    // The dataflow of the calling thread; nullptr outside of a simulation.
    static Dataflow*& current() {
        thread_local Dataflow* dataflow = nullptr;
        return dataflow;
    }

    std::mutex& mutex() { return mutex_; }

    void add_process() {
        const std::lock_guard<std::mutex> lock(mutex_);
        ++num_running_;
    }

    void end_process(const std::string& failure) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failure_.empty()) failure_ = failure;
        --num_running_;
        look_for_deadlock();
    }

    // Called when the top has started all its processes; it continues when they have ended.
    void all_started() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (starting_) --num_running_;
        starting_ = false;
        look_for_deadlock();
    }

    // Requires the mutex. Lets the calling process wait for a stream that is not ready.
    void wait(std::unique_lock<std::mutex>& lock, const std::string& what, const std::function<bool()>& ready) {
        Waiter waiter;
        waiter.what = process_name() + " waits to " + what;
        waiter.ready = ready;
        waiters_.insert(&waiter);
        --num_running_;
        look_for_deadlock();
        waiter.wake.wait(lock, [&] { return ready() || deadlocked_; });
        waiters_.erase(&waiter);
        ++num_running_;
        if (!ready()) throw Deadlock(failure_);
    }

    // Requires the mutex. Called when a stream has changed.
    void wake_ready() {
        for (Waiter* waiter : waiters_) {
            if (waiter->ready()) waiter->wake.notify_one();
        }
    }

    // Why the first process failed; empty if none did. Read it when all have ended.
    const std::string& failure() const { return failure_; }

 private:
    struct Waiter {
        std::string what;
        std::function<bool()> ready;
        std::condition_variable wake;
    };

    void look_for_deadlock() {
        if (num_running_ > 0 || waiters_.empty() || deadlocked_) return;
        for (const Waiter* waiter : waiters_) {
            if (waiter->ready()) return;  // it was woken and will run
        }
        deadlocked_ = true;
        std::set<std::string> lines;  // sorted, so that the order does not depend on addresses
        for (const Waiter* waiter : waiters_) lines.insert(waiter->what);
        std::string waiting;
        for (const std::string& line : lines) waiting += (waiting.empty() ? "" : "; ") + line;
        failure_ = (failure_.empty() ? "deadlock: " : failure_ + "; then ") + waiting;
        for (Waiter* waiter : waiters_) waiter->wake.notify_one();
    }

    std::mutex mutex_;
    bool starting_ = true;
    int num_running_ = 1;  // counts the top while it starts processes
    std::set<Waiter*> waiters_;
    bool deadlocked_ = false;
    std::string failure_;
};

}  // namespace sim
