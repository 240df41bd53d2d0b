#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/abandoned_call.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

// An engine that abandons requests that do not return in time: their handler is told kNotReturned and nothing later.
// Until such a request returns, nobody else may use its memory or the part of the file that it writes.
//
// Like every engine's, the destructor waits for all submitted requests; it may not be called while any_abandoned().
class DeadlineEngine final : public IoEngine, private CompletionHandler {
 public:
    DeadlineEngine(std::unique_ptr<IoEngine> inner, std::chrono::milliseconds timeout);
    ~DeadlineEngine() override;
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

    // Returns whether any abandoned request has not returned yet.
    bool any_abandoned() const;
    // Returns the writes among these requests.
    std::vector<IoRequest> abandoned_writes() const;

 private:
    friend struct Seams;  // testing/seams.hpp

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
    std::vector<Waiting> abandon_overdue();

    const std::chrono::milliseconds timeout_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<std::size_t, Waiting> waiting_;  // by tag: at most one request per tag is in flight
    std::map<std::size_t, Abandoned> abandoned_;
    bool closing_ = false;
    std::unique_ptr<IoEngine> inner_;  // its destructor waits for completions
    std::thread watch_;
};

}  // namespace smart_infinity
