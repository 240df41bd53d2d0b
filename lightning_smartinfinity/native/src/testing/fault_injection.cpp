#include "testing/fault_injection.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "base/buffer.hpp"

namespace smart_infinity {

FaultInjectingEngine::FaultInjectingEngine(std::unique_ptr<IoEngine> inner, const Faults& faults)
    : faults_(faults), generator_(faults.seed), inner_(std::move(inner)) {}

void FaultInjectingEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    IoRequest real = request;
    {
        const std::lock_guard lock(mutex_);
        const Pending pending = decide(request, handler);
        // The real transfer stays a whole number of blocks, as direct I/O requires.
        const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(pending.at_most, 1));
        real.bytes = std::min(request.bytes, align_up(bytes, kBlockBytes));
        pending_.insert_or_assign(request.tag, pending);
    }
    inner_->submit(real, *this);
}

FaultInjectingEngine::Pending FaultInjectingEngine::decide(const IoRequest& request, CompletionHandler& handler) {
    const bool read = request.direction == Direction::kRead;
    const std::int64_t number = read ? num_reads_++ : num_writes_++;
    auto at_most = static_cast<std::int64_t>(request.bytes);
    if (number == (read ? faults_.fail_read_at : faults_.fail_write_at)) {
        at_most = -faults_.error;
    } else if (faults_.short_transfer_every > 0 && (num_reads_ + num_writes_) % faults_.short_transfer_every == 0 &&
               request.bytes > kBlockBytes) {
        at_most = random(kBlockBytes, at_most - 1);  // at least a block, so that every transfer ends
    }
    const std::int64_t delay_us = faults_.max_delay_us > 0 ? random(0, faults_.max_delay_us) : 0;
    return Pending{request, &handler, at_most, delay_us};
}

std::int64_t FaultInjectingEngine::random(std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(generator_);
}

void FaultInjectingEngine::completed(const IoRequest& request, const IoResult& result) {
    std::unique_lock lock(mutex_);
    const Pending pending = pending_.at(request.tag);
    lock.unlock();
    if (pending.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pending.delay_us));
    pending.handler->completed(pending.request, {std::min(result.transferred, pending.at_most), result.seconds});
}

}  // namespace smart_infinity
