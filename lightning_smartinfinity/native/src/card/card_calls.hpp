#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "base/worker_pool.hpp"
#include "card/card_binding.hpp"
#include "io/io_engine.hpp"

namespace smart_infinity {

// Thrown for a call that was abandoned because it did not return in time.
class CallNotReturned : public CardError {
 public:
    using CardError::CardError;
};

// Makes calls that may never return, in threads of its own. Callers wait for a limited time.
//
// The destructor waits for all calls, so it may not be called while any_abandoned().
class CardCalls {
 public:
    CardCalls(std::size_t num_callers, std::chrono::milliseconds timeout);

    // Makes a call and waits until it has returned. Rethrows the call's CardError. Throws CallNotReturned if the time
    // passes first; the call then continues, and keeps everything that it captured.
    void make(const std::string& name, std::function<void()> call);
    // Sets a function to call before each transfer(); tests use it to delay transfers. No transfer may be in progress.
    using Gate = std::function<void(const IoRequest&)>;
    void put_before_transfers(Gate gate) { gate_ = std::move(gate); }
    // Does the same as make(), for a call that makes a transfer.
    void transfer(const std::string& name, const IoRequest& request, std::function<void()> call);
    // Returns whether an abandoned call is still running.
    bool any_abandoned() const { return num_abandoned_ > 0; }

 private:
    struct Call;

    void run(Call& call);

    const std::chrono::milliseconds timeout_;
    std::atomic<std::size_t> num_abandoned_ = 0;
    Gate gate_;
    WorkerPool<std::shared_ptr<Call>> pool_;  // last member: its destructor waits for threads that use the others
};

}  // namespace smart_infinity
