#include "testing/fault_injection.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/buffer.hpp"
#include "card/card_binding.hpp"
#include "io/blocking_transfer.hpp"

namespace smart_infinity {
namespace {

std::int64_t draw(std::mt19937_64& generator, std::int64_t first, std::int64_t last) {
    return std::uniform_int_distribution<std::int64_t>(first, last)(generator);
}

void flip_one_bit(std::mt19937_64& generator, std::byte* data, std::int64_t bytes) {
    const std::int64_t bit = draw(generator, 0, 8 * bytes - 1);
    data[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
}

std::uint64_t elsewhere(std::uint64_t offset, const Faults& faults) {
    const auto distance = static_cast<std::uint64_t>(faults.misread_by);
    return offset >= distance ? offset - distance : offset + distance;
}

bool differ(const std::byte* one, const std::byte* other, std::int64_t bytes) {
    return bytes > 0 && std::memcmp(one, other, static_cast<std::size_t>(bytes)) != 0;
}

// Reads the file's content in the range of the request, at `offset`.
std::unique_ptr<HostBuffer> content_at(IoRequest request, std::uint64_t offset) {
    auto content = std::make_unique<HostBuffer>(request.bytes);
    request.direction = Direction::kRead;
    request.offset = offset;
    request.data = content->data();
    attempt(request);
    return content;
}

}  // namespace

FaultInjectingEngine::FaultInjectingEngine(std::unique_ptr<IoEngine> inner, const Faults& faults,
                                           std::shared_ptr<FaultCounts> counts)
    : faults_(faults), counts_(std::move(counts)), generator_(faults.seed), inner_(std::move(inner)) {}

void FaultInjectingEngine::submit(const IoRequest& request, CompletionHandler& handler) {
    IoRequest real = request;
    {
        const std::lock_guard lock(mutex_);
        const std::int64_t number = request.direction == Direction::kRead ? counts_->reads++ : counts_->writes++;
        const Pending pending = decide(request, handler, number);
        real = real_request(pending);
        pending_.insert_or_assign(request.tag, pending);
    }
    inner_->submit(real, *this);
}

IoRequest FaultInjectingEngine::real_request(const Pending& pending) const {
    IoRequest real = pending.request;
    // The real transfer stays a whole number of blocks, as direct I/O requires.
    const auto bytes = static_cast<std::size_t>(std::max<std::int64_t>(pending.at_most, 1));
    real.bytes = std::min(real.bytes, align_up(bytes, kBlockBytes));
    if (pending.lost) {
        real.direction = Direction::kRead;
        real.data = pending.lost->data();
    } else if (pending.misread) {
        real.offset = elsewhere(real.offset, faults_);
    }
    return real;
}

void FaultInjectingEngine::flip_bit(const IoRequest& request, std::int64_t transferred) {
    if (transferred <= 0) return;
    const std::lock_guard lock(mutex_);
    flip_one_bit(generator_, request.data, transferred);
    ++counts_->flipped;
}

FaultInjectingEngine::Pending FaultInjectingEngine::decide(const IoRequest& request, CompletionHandler& handler,
                                                           std::int64_t number) {
    const bool read = request.direction == Direction::kRead;
    auto at_most = static_cast<std::int64_t>(request.bytes);
    if (number == (read ? faults_.fail_read_at : faults_.fail_write_at)) {
        at_most = -faults_.error;
    } else if (faults_.short_transfer_every > 0 &&
               (counts_->reads + counts_->writes) % faults_.short_transfer_every == 0 && request.bytes > kBlockBytes) {
        // At least a block is transferred, so that every transfer ends.
        at_most = draw(generator_, kBlockBytes, at_most - 1);
    }
    const std::int64_t delay_us =
        faults_.delay_us + (faults_.max_delay_us > 0 ? draw(generator_, 0, faults_.max_delay_us) : 0);
    const bool lost = !read && number == faults_.lose_write_at;
    return Pending{request,
                   &handler,
                   at_most,
                   delay_us,
                   read && number == faults_.flip_read_at,
                   read && number == faults_.misread_at,
                   lost ? std::make_shared<HostBuffer>(request.bytes) : nullptr};
}

// Counts the faults of a request, before its submitter may reuse its memory.
void FaultInjectingEngine::count(const Pending& pending, std::int64_t transferred) {
    const IoRequest& request = pending.request;
    if (pending.at_most < 0) ++counts_->failed;
    if (pending.at_most >= 0 && pending.at_most < static_cast<std::int64_t>(request.bytes)) ++counts_->shortened;
    if (pending.delay_us > 0) ++counts_->delayed;
    if (pending.lost && differ(pending.lost->data(), request.data, transferred)) ++counts_->lost;
    if (pending.misread && differ(content_at(request, request.offset)->data(), request.data, transferred)) {
        ++counts_->misread;
    }
}

void FaultInjectingEngine::completed(const IoRequest& request, const IoResult& result) {
    std::unique_lock lock(mutex_);
    const Pending pending = pending_.at(request.tag);
    lock.unlock();
    if (pending.delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pending.delay_us));
    if (pending.flips) flip_bit(request, result.transferred);
    count(pending, result.transferred);
    pending.handler->completed(pending.request, {std::min(result.transferred, pending.at_most), result.seconds});
}

FaultInjectingGate::FaultInjectingGate(const Faults& faults, std::shared_ptr<FaultCounts> counts)
    : faults_(faults), counts_(std::move(counts)), generator_(faults.seed) {}

void FaultInjectingGate::operator()(const IoRequest& request) {
    std::unique_lock lock(mutex_);
    if (request.direction == Direction::kRead) {
        const std::int64_t number = counts_->reads++;
        if (number == faults_.fail_read_at) fail("reading");
        change(request, number);
    } else {
        const std::int64_t number = counts_->writes++;
        if (number == faults_.fail_write_at) fail("writing");
        if (number == faults_.lose_write_at) lost_[request.offset] = content_at(request, request.offset);
    }
    const std::int64_t delay_us =
        faults_.delay_us + (faults_.max_delay_us > 0 ? draw(generator_, 0, faults_.max_delay_us) : 0);
    if (delay_us == 0) return;
    ++counts_->delayed;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
}

void FaultInjectingGate::fail(const char* what) {
    ++counts_->failed;
    throw CardError(std::string(what) + " the gradient failed: injected", faults_.error);
}

void FaultInjectingGate::change(const IoRequest& read, std::int64_t number) {
    if (const auto lost = lost_.extract(read.offset)) replace(read, lost.mapped()->data(), counts_->lost);
    if (number == faults_.misread_at) {
        replace(read, content_at(read, elsewhere(read.offset, faults_))->data(), counts_->misread);
    }
    if (number == faults_.flip_read_at) {
        const auto content = content_at(read, read.offset);
        flip_one_bit(generator_, content->data(), static_cast<std::int64_t>(read.bytes));
        replace(read, content->data(), counts_->flipped);
    }
}

// Writes the bytes that the read should return, and counts the read if they differ from the file's.
void FaultInjectingGate::replace(const IoRequest& read, const std::byte* content, FaultCounts::Count& count) {
    if (!differ(content_at(read, read.offset)->data(), content, static_cast<std::int64_t>(read.bytes))) return;
    IoRequest write = read;
    write.direction = Direction::kWrite;
    write.data = const_cast<std::byte*>(content);
    attempt(write);
    ++count;
}

}  // namespace smart_infinity
