#pragma once

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/process.hpp"

namespace smart_infinity {

// A loop with an end: close() may come while other threads use it, and a forked child, which has neither its threads
// nor its memory and may find its locks held for ever, leaves it alone.
//
// `Loop` has close(), after which nothing is in flight, and `Report report() const`, which outlives it here.
template <class Loop, class Report>
class Closable {
 public:
    Closable(std::string owner, std::shared_ptr<Loop> loop) : owner_(std::move(owner)), loop_(std::move(loop)) {}
    ~Closable() {
        if (process_.is_current()) {
            close();
        } else {
            (void)new std::shared_ptr<Loop>(std::move(loop_));  // lost on purpose: it cannot be destroyed here
        }
    }
    Closable(const Closable&) = delete;
    Closable& operator=(const Closable&) = delete;

    // Throws std::invalid_argument when closed.
    std::shared_ptr<Loop> get() const {
        process_.require_current(owner_);
        const std::lock_guard lock(mutex_);
        if (!loop_) throw std::invalid_argument(owner_ + ": it is closed");
        return loop_;
    }

    // Of the loop, or the last one of a loop that is closed.
    Report report() const {
        process_.require_current(owner_);
        const std::lock_guard lock(mutex_);
        return loop_ ? loop_->report() : final_report_;
    }

    // Idempotent.
    void close() {
        if (!process_.is_current()) return;
        std::shared_ptr<Loop> closing;
        {
            const std::lock_guard lock(mutex_);
            closing = loop_;
        }
        if (!closing) return;
        closing->close();
        const std::lock_guard lock(mutex_);
        final_report_ = closing->report();
        loop_.reset();
    }

 private:
    Process process_;
    std::string owner_;
    mutable std::mutex mutex_;  // of what follows
    std::shared_ptr<Loop> loop_;
    Report final_report_{};
};

}  // namespace smart_infinity
