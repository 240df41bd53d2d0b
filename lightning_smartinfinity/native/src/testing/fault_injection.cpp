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
        const std::int64_t number = request.direction == Direction::kRead ? num_reads_++ : num_writes_++;
        const Pending pending = decide(request, handler, number);
        real = real_request(pending, number);
        pending_.insert_or_assign(request.tag, pending);
    }
    inner_->submit(real, *this);
}

IoRequest FaultInjectingEngine::real_request(const Pending& pending, std::int64_t number) const {
    IoRequest real = pending.request;
    // The real transfer stays a whole number of blocks, as direct I/O requires.
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(pending.at_most, 1));
    real.bytes = std::min(real.bytes, align_up(bytes, kBlockBytes));
    if (pending.lost) {
        real.direction = Direction::kRead;
        real.data = pending.lost->data();
    } else if (real.direction == Direction::kRead && number == faults_.misread_at) {
        const auto distance = static_cast<std::uint64_t>(faults_.misread_by);
        real.offset = real.offset >= distance ? real.offset - distance : real.offset + distance;
    }
    return real;
}

void FaultInjectingEngine::flip_bit(const IoRequest& request, std::int64_t transferred) {
    if (transferred <= 0) return;
    const std::lock_guard lock(mutex_);
    const std::int64_t bit = random(0, 8 * transferred - 1);
    request.data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
}

FaultInjectingEngine::Pending FaultInjectingEngine::decide(const IoRequest& request, CompletionHandler& handler,
                                                           std::int64_t number) {
    const bool read = request.direction == Direction::kRead;
    auto at_most = static_cast<std::int64_t>(request.bytes);
    if (number == (read ? faults_.fail_read_at : faults_.fail_write_at)) {
        at_most = -faults_.error;
    } else if (faults_.short_transfer_every > 0 && (num_reads_ + num_writes_) % faults_.short_transfer_every == 0 &&
               request.bytes > kBlockBytes) {
        at_most = random(kBlockBytes, at_most - 1);  // at least a block, so that every transfer ends
    }
    const std::int64_t delay_us = faults_.delay_us + (faults_.max_delay_us > 0 ? random(0, faults_.max_delay_us) : 0);
    const bool lost = !read && number == faults_.lose_write_at;
    return Pending{request,
                   &handler,
                   at_most,
                   delay_us,
                   read && number == faults_.flip_read_at,
                   lost ? std::make_shared<HostBuffer>(request.bytes) : nullptr};
}

std::int64_t FaultInjectingEngine::random(std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(generator_);
}

void FaultInjectingEngine::completed(const IoRequest& request, const IoResult& result) {
    std::unique_lock lock(mutex_);
    const Pending pending = pending_.at(request.tag);
    lock.unlock();
    if (pending.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pending.delay_us));
    if (pending.flips) flip_bit(request, result.transferred);
    pending.handler->completed(pending.request, {std::min(result.transferred, pending.at_most), result.seconds});
}

}  // namespace smart_infinity
