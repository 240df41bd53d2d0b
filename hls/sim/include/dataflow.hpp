// The processes of one call of a top, with a watchdog: if every remaining process waits for a stream, none will ever
// continue. This is detected when it happens, without a clock.
#pragma once

#include <condition_variable>
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
    // A process that waits for a stream until the stream's other process serves it.
    struct Waiter {
        std::string what;
        bool served = false;
        std::condition_variable wake;
    };

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

    // Requires the mutex. `link` is where the other process finds the waiter to serve it.
    void wait(std::unique_lock<std::mutex>& lock, Waiter*& link, const std::string& what) {
        Waiter waiter;
        waiter.what = process_name() + " waits to " + what;
        link = &waiter;
        waiters_.insert(&waiter);
        --num_running_;
        look_for_deadlock();
        waiter.wake.wait(lock, [&] { return waiter.served || deadlocked_; });
        if (waiter.served) return;
        link = nullptr;
        waiters_.erase(&waiter);
        ++num_running_;
        throw Deadlock(failure_);
    }

    // Requires the mutex.
    void serve(Waiter*& link) {
        if (link == nullptr) return;
        link->served = true;
        waiters_.erase(link);
        ++num_running_;
        link->wake.notify_one();
        link = nullptr;
    }

    // Why the first process failed; empty if none did. Read it when all have ended.
    const std::string& failure() const { return failure_; }

 private:
    void look_for_deadlock() {
        if (num_running_ > 0 || waiters_.empty() || deadlocked_) return;
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
