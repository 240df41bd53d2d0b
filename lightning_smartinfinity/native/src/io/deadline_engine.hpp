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

// An engine that abandons requests that do not return in time: it completes them with kNotReturned, and ignores their
// later result. Until such a request returns, its memory and the part of the file that it writes must not be used, and
// the engine refuses further requests: it completes them with kNotReturned after zero seconds.
//
// While earlier requests return, the time of later ones starts anew; it also does after the process was paused, as by a
// debugger. After ask_to_end() the time limit is shorter. Time in which a request waited for its turn while no request
// returned counts (IoRequest::since).
//
// A thread checks the requests periodically, so a request costs no system call and wakes no thread, except the first
// one after an idle period. Like every engine's, the destructor waits for all submitted requests; it may not be called
// while any_abandoned().
class DeadlineEngine final : public IoEngine, private CompletionHandler {
 public:
    DeadlineEngine(std::unique_ptr<IoEngine> inner, std::chrono::milliseconds timeout);
    ~DeadlineEngine() override;
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

    // Returns whether an abandoned request has not returned yet.
    bool any_abandoned() const;
    // Returns the writes among the abandoned requests.
    std::vector<IoRequest> abandoned_writes() const;

 private:
    friend struct Seams;  // testing/seams.hpp

    using Clock = std::chrono::steady_clock;

    struct Waiting {
        IoRequest request;
        CompletionHandler* handler;
        std::uint64_t number;     // in the order of submission
        Clock::time_point since;  // its submission, or the last return of an earlier request
    };

    struct Abandoned {
        explicit Abandoned(const IoRequest& late) : request(late) {}
        IoRequest request;
        AbandonedCall call;
    };

    struct Late {
        IoRequest request;
        CompletionHandler* handler;
        std::chrono::milliseconds limit;  // the limit that it exceeded; 0: it was refused
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
