#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>

#include "io_engine.hpp"
#include "stopwatch.hpp"
#include "worker_pool.hpp"

namespace smart_infinity {

// How fast one open file may be; 0: as fast as it is.
struct Throttle {
    explicit Throttle(int file) : descriptor(file) {}
    const int descriptor;
    std::atomic<double> bytes_per_second{0};
};

// An engine in which requests to one file take turns and the time of a slow device, for tests. Other files are left
// alone.
class ThrottledEngine final : public IoEngine, private CompletionHandler {
 public:
    ThrottledEngine(std::unique_ptr<IoEngine> inner, std::shared_ptr<const Throttle> throttle);
    void submit(const IoRequest& request, CompletionHandler& handler) override;
    IoUsage usage() const override { return inner_->usage(); }
    IoEngineKind kind() const override { return inner_->kind(); }

 private:
    struct Pending {
        CompletionHandler* handler;
        Stopwatch stopwatch;
    };
    struct Done {
        IoRequest request;
        IoResult result;
    };

    void completed(const IoRequest& request, const IoResult& result) override { slow_.push({request, result}); }
    void pass_on(const Done& done);

    const std::shared_ptr<const Throttle> throttle_;
    std::mutex mutex_;
    std::map<std::size_t, Pending> pending_;  // by tag: one request per tag is in flight
    WorkerPool<Done> slow_;                   // of one thread
    std::unique_ptr<IoEngine> inner_;         // last: its destructor waits for completions
};

}  // namespace smart_infinity
