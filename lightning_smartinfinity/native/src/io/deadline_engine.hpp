#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/abandoned_call.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

// An engine that abandons requests that do not return in time: their handler is told kNotReturned and nothing later.
// Until such a request returns, nobody else may use its memory or the part of the file that it writes, and the engine
// refuses later requests: their handler is told kNotReturned, after no time.
//
// A request that waits behind others is not late while these return, and none is late because the process was paused,
// as by a debugger. After ask_to_end() the time is shorter. If a request has waited for its turn while nothing returned
// (IoRequest::since), that is part of its time.
//
// A thread looks at the requests now and then. So a request costs no system call and wakes no thread, except the first
// one after a pause. Like every engine's, the destructor waits for all submitted requests; it may not be called while
// any_abandoned().
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
        std::uint64_t number;     // in the order of submission
        Clock::time_point since;  // its submission, or when an earlier request was last seen to return
    };

    struct Abandoned {
        explicit Abandoned(const IoRequest& late) : request(late) {}
        IoRequest request;
        AbandonedCall call;
    };

    struct Late {
        IoRequest request;
        CompletionHandler* handler;
        std::chrono::milliseconds limit;  // that it exceeded; 0: it was refused
    };

    static constexpr std::uint64_t kNone = std::numeric_limits<std::uint64_t>::max();

    void completed(const IoRequest& request, const IoResult& result) override;
    void watch();
    Clock::time_point since(const IoRequest& request) const;

    // The following are called with the mutex held.
    void rest(std::unique_lock<std::mutex>& lock);
    Clock::time_point next_look() const;
    void note_pause();
    void note_progress();
    std::vector<Late> take_late();

    const std::chrono::milliseconds timeout_;
    const std::chrono::milliseconds between_looks_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::unordered_map<std::size_t, Waiting> waiting_;  // by tag: at most one request per tag is in flight
    std::unordered_map<std::size_t, Abandoned> abandoned_;
    std::vector<Late> refused_;
    std::uint64_t next_number_ = 0;
    std::uint64_t earliest_returned_ = kNone;  // smallest number of a request that returned since the last look
    Clock::time_point looked_at_ = Clock::now();
    bool asleep_ = false;
    bool closing_ = false;
    std::unique_ptr<IoEngine> inner_;  // its destructor waits for completions
    std::thread watch_;
};

}  // namespace smart_infinity
