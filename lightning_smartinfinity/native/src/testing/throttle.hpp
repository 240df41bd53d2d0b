#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "base/stopwatch.hpp"
#include "base/worker_pool.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

// A limit on the total speed of some open files, which several engines may share; 0: unlimited.
class Throttle {
 public:
    using Clock = std::chrono::steady_clock;

    std::atomic<double> bytes_per_second{0};

    // Returns the time at which a request that is submitted now ends.
    Clock::time_point take_turn(std::size_t bytes);

 private:
    std::mutex mutex_;
    Clock::time_point end_of_turns_;
};

// An engine for tests in which requests to some files take turns, from their submission on, at the speed of a slow
// device or of a slow channel that several devices share. A turn includes the request's real duration and its turn in
// another throttle below this one, since a request passes through both at the same time. Other files are unaffected.
class ThrottledEngine final : public IoEngine, private CompletionHandler {
 public:
    ThrottledEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<Throttle> throttle, std::set<int> descriptors);
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

 private:
    struct Pending {
        CompletionHandler* handler;
        Stopwatch stopwatch;
        Throttle::Clock::time_point end_of_turn;
    };
    struct Done {
        IoRequest request;
        IoResult result;
    };

    void completed(const IoRequest& request, const IoResult& result) override { slow_.push({request, result}); }
    void pass_on(const Done& done);

    const std::shared_ptr<Throttle> throttle_;
    const std::set<int> descriptors_;
    std::mutex mutex_;
    std::map<std::size_t, Pending> pending_;  // by tag: one request per tag is in flight
    WorkerPool<Done> slow_;                   // one thread
    std::unique_ptr<IoEngine> inner_;         // last member: its destructor waits for completions
};

}  // namespace smart_infinity
