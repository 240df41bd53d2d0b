#include "card/card_calls.hpp"

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

#include "base/abandoned_call.hpp"

namespace smart_infinity {

struct CardCalls::Call {
    std::function<void()> function;
    std::mutex mutex;  // guards the members below
    std::condition_variable changed;
    bool returned = false;
    std::optional<std::pair<std::string, int>> error;  // message and errno
    std::unique_ptr<AbandonedCall> abandoned;
};

CardCalls::CardCalls(std::size_t num_callers, std::chrono::milliseconds timeout)
    : timeout_(timeout),
      pool_("smart-inf-card", num_callers, [this](const std::shared_ptr<Call>& call) { run(*call); }) {}

void CardCalls::make(const std::string& name, std::function<void()> function) {
    const auto call = std::make_shared<Call>();
    call->function = std::move(function);
    pool_.push(call);
    std::unique_lock lock(call->mutex);
    if (!call->changed.wait_for(lock, timeout_, [&call] { return call->returned; })) {
        call->abandoned = std::make_unique<AbandonedCall>();
        ++num_abandoned_;
        throw CallNotReturned(name + " did not return within " + std::to_string(timeout_.count()) + " ms");
    }
    if (call->error) throw CardError(call->error->first, call->error->second);
}

void CardCalls::transfer(const std::string& name, const IoRequest& request, std::function<void()> call) {
    if (!gate_) return make(name, std::move(call));
    make(name, [gate = gate_, request, call = std::move(call)] {
        gate(request);
        call();
    });
}

void CardCalls::run(Call& call) {
    std::optional<std::pair<std::string, int>> problem;
    try {
        call.function();
    } catch (const CardError& error) {
        problem.emplace(error.what(), error.error());
    }
    call.function = nullptr;
    const std::lock_guard lock(call.mutex);
    call.error = std::move(problem);
    call.returned = true;
    if (call.abandoned) {
        call.abandoned.reset();
        --num_abandoned_;
    }
    call.changed.notify_all();
}

}  // namespace smart_infinity
