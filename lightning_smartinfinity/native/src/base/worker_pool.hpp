#pragma once

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace smart_infinity {

// Blocks signals in threads that are started while it exists, because the interpreter's threads handle them. Signals
// that report a fault of the thread itself stay unblocked.
class BlockedSignals {
 public:
    BlockedSignals() {
        sigset_t blocked;
        sigfillset(&blocked);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT}) sigdelset(&blocked, fault);
        pthread_sigmask(SIG_SETMASK, &blocked, &saved_);
    }
    ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }
    BlockedSignals(const BlockedSignals&) = delete;
    BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
    sigset_t saved_;
};

// Returns the CPU time, user and system, of a thread that has not been joined.
inline double cpu_seconds(std::thread& thread) {
    clockid_t clock;
    timespec time{};
    if (pthread_getcpuclockid(thread.native_handle(), &clock) != 0 || ::clock_gettime(clock, &time) != 0) return 0;
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// Threads that process items in the order of push(). The destructor processes the queued items, then joins the threads.
template <class Item>
class WorkerPool {
 public:
    WorkerPool(const char* name, std::size_t num_threads, std::function<void(const Item&)> work)
        : work_(std::move(work)) {
        const BlockedSignals blocked;
        try {
            for (std::size_t i = 0; i < num_threads; ++i) {
                threads_.emplace_back([this] { run(); });
                pthread_setname_np(threads_.back().native_handle(), name);
            }
        } catch (...) {
            join();
            throw;
        }
    }
    ~WorkerPool() { join(); }
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;

    void push(const Item& item) {
        {
            const std::lock_guard lock(mutex_);
            items_.push_back(item);
        }
        available_.notify_one();
    }

    double cpu_seconds() {
        double seconds = 0;
        for (std::thread& thread : threads_) seconds += smart_infinity::cpu_seconds(thread);
        return seconds;
    }

 private:
    void run() {
        for (;;) {
            std::unique_lock lock(mutex_);
            available_.wait(lock, [this] { return closing_ || !items_.empty(); });
            if (items_.empty()) return;
            const Item item = items_.front();
            items_.pop_front();
            lock.unlock();
            work_(item);
        }
    }

    void join() {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
        }
        available_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    std::function<void(const Item&)> work_;
    std::mutex mutex_;
    std::condition_variable available_;
    std::deque<Item> items_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace smart_infinity
