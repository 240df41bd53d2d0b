#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/abandoned_call.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

// An engine that abandons requests that do not return in time: their handler is told kNotReturned, and never hears of
// them again. Until such a request returns, its memory is its own, and so is what it writes in the file.
//
// The destructor waits for all that was submitted, as every engine's; while any_abandoned(), it may not be called.
class DeadlineEngine final : public IoEngine, private CompletionHandler {
 public:
    using Decorate = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

    DeadlineEngine(std::unique_ptr<IoEngine> inner, std::chrono::milliseconds timeout);
    ~DeadlineEngine() override;
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

    // Returns whether an abandoned request has not returned.
    bool any_abandoned() const;
    // Returns those that write.
    std::vector<IoRequest> abandoned_writes() const;
    // Puts an engine behind this one, in front of the one behind it now. Nothing may be in flight.
    void decorate(const Decorate& decorate) { inner_ = decorate(std::move(inner_)); }

 private:
    using Clock = std::chrono::steady_clock;

    struct Waiting {
        IoRequest request;
        CompletionHandler* handler;
        Clock::time_point deadline;
    };

    struct Abandoned {
        explicit Abandoned(const IoRequest& late) : request(late) {}
        IoRequest request;
        AbandonedCall call;
    };

    void completed(const IoRequest& request, const IoResult& result) override;
    void watch();
    std::vector<Waiting> take_overdue();

    const std::chrono::milliseconds timeout_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::size_t, Waiting> waiting_;  // by tag: one request per tag is in flight
    std::map<std::size_t, Abandoned> abandoned_;
    bool closing_ = false;
    std::unique_ptr<IoEngine> inner_;  // its destructor waits for completions
    std::thread watch_;
};

}  // namespace smart_infinity
