#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "worker_pool.hpp"

namespace smart_infinity {

// Calls that may never return, in threads of their own: their callers wait for them only so long.
//
// The destructor waits for all of them; while any_out(), it may not be called.
class CardCalls {
 public:
    CardCalls(std::size_t num_callers, std::chrono::milliseconds timeout);

    // Until the call has returned. Throws the CardError that it throws, or one that says that it did not return in
    // time: then it goes on, with all that it was made of.
    void make(const std::string& name, std::function<void()> call);
    // Whether a call that was given up has not returned.
    bool any_out() const { return num_out_ > 0; }

 private:
    struct Call;

    void run(Call& call);

    const std::chrono::milliseconds timeout_;
    std::atomic<std::size_t> num_out_ = 0;
    WorkerPool<std::shared_ptr<Call>> pool_;  // last: its destructor waits for threads that use the above
};

}  // namespace smart_infinity
