#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/process.hpp"

namespace smart_infinity {

// A pipeline or a queue for Python: close() may be called while other threads use it, and frees everything that it
// holds. A forked child has neither its threads nor its memory, and its locks may be held for ever, so the child does
// not touch it.
//
// `Worker` has close(), after which nothing is in flight, and report(), whose last result is kept here.
template <class Worker>
class Closable {
 public:
    using Report = decltype(std::declval<const Worker&>().report());

    Closable(std::string name, std::shared_ptr<Worker> worker) : name_(std::move(name)), worker_(std::move(worker)) {}
    ~Closable() {
        if (process_.is_current()) {
            const nanobind::gil_scoped_release release;  // close() waits for actions in flight
            close();
        } else {
            (void)new std::shared_ptr<Worker>(std::move(worker_));  // leaked on purpose: it cannot be destroyed here
        }
    }
    Closable(const Closable&) = delete;
    Closable& operator=(const Closable&) = delete;

    // Throws std::invalid_argument if it is closed.
    std::shared_ptr<Worker> get() const {
        process_.require_current(name_);
        const std::lock_guard lock(mutex_);
        if (!worker_) throw std::invalid_argument(name_ + ": it is closed");
        return worker_;
    }

    // Returns the worker's report, or its last one if it is closed.
    Report report() const {
        process_.require_current(name_);
        const std::lock_guard lock(mutex_);
        return worker_ ? worker_->report() : final_report_;
    }

    // Closes the worker; idempotent.
    void close() {
        if (!process_.is_current()) return;
        std::shared_ptr<Worker> closing;
        {
            const std::lock_guard lock(mutex_);
            closing = worker_;
        }
        if (!closing) return;
        closing->close();
        const std::lock_guard lock(mutex_);
        final_report_ = closing->report();
        worker_.reset();
    }

 private:
    Process process_;
    std::string name_;
    mutable std::mutex mutex_;  // guards the members below
    std::shared_ptr<Worker> worker_;
    Report final_report_{};
};

// Binds a method of the worker.
template <class Worker, class Result, class... Arguments>
auto method(Result (Worker::*call)(Arguments...)) {
    return [call](const Closable<Worker>& self, Arguments... arguments) {
        return (self.get().get()->*call)(std::forward<Arguments>(arguments)...);
    };
}
template <class Worker, class Result, class... Arguments>
auto method(Result (Worker::*call)(Arguments...) const) {
    return [call](const Closable<Worker>& self, Arguments... arguments) {
        return (self.get().get()->*call)(std::forward<Arguments>(arguments)...);
    };
}

}  // namespace smart_infinity
