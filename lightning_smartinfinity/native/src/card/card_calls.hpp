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
// The destructor waits for all calls; it may not be called while any_abandoned().
class CardCalls {
 public:
    CardCalls(std::size_t num_callers, std::chrono::milliseconds timeout);

    // Makes a call and waits until it has returned. Throws the CardError that it throws, or CallNotReturned: then the
    // call continues and keeps everything that it captured.
    void make(const std::string& name, std::function<void()> call);
    // Calls `gate` before each transfer(). Tests use it to delay transfers. No transfer may be in progress.
    using Gate = std::function<void(const IoRequest&)>;
    void put_before_transfers(Gate gate) { gate_ = std::move(gate); }
    // Does what make() does, for a call that makes a transfer.
    void transfer(const std::string& name, const IoRequest& request, std::function<void()> call);
    // Returns whether an abandoned call has not returned.
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
