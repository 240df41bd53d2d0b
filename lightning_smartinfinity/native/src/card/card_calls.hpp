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

// A call was abandoned, as it did not return in time.
class CallNotReturned : public CardError {
 public:
    using CardError::CardError;
};

// Calls that may never return, in threads of their own: their callers wait for them only so long.
//
// The destructor waits for all of them; while any_abandoned(), it may not be called.
class CardCalls {
 public:
    CardCalls(std::size_t num_callers, std::chrono::milliseconds timeout);

    // Until the call has returned. Throws the CardError that it throws, or CallNotReturned: then it goes on, with all
    // that it was made of.
    void make(const std::string& name, std::function<void()> call);
    // Before each transfer() something is called that may keep it waiting, for tests. None may be under way.
    using Gate = std::function<void(const IoRequest&)>;
    void put_before_transfers(Gate gate) { gate_ = std::move(gate); }
    // As make(), for a transfer that the call makes.
    void transfer(const std::string& name, const IoRequest& request, std::function<void()> call);
    // Returns whether an abandoned call has not returned.
    bool any_abandoned() const { return num_abandoned_ > 0; }

 private:
    struct Call;

    void run(Call& call);

    const std::chrono::milliseconds timeout_;
    std::atomic<std::size_t> num_abandoned_ = 0;
    Gate gate_;
    WorkerPool<std::shared_ptr<Call>> pool_;  // last: its destructor waits for threads that use the above
};

}  // namespace smart_infinity
