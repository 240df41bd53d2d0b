// Runs of a card's kernels, from submission to end.
#include <ert.h>

#include <algorithm>
#include <cerrno>

#include "base/system_error.hpp"
#include "card.hpp"
#include "journal.hpp"
#include "run_memory.hpp"

namespace smart_infinity::emulator {
namespace {

const char* name_of(unsigned state) {
    if (state == ERT_CMD_STATE_COMPLETED) return "completed";
    return state == ERT_CMD_STATE_ABORT ? "abort" : "error";
}

ert_packet* packet_of(const Buffer& buffer) { return reinterpret_cast<ert_packet*>(buffer.host()); }

// Returns the words from the first mask of compute units on.
std::span<const std::uint32_t> payload_of(const ert_packet& packet) { return {packet.data, packet.count}; }

}  // namespace

void Card::submit(unsigned handle) {
    check_present();
    if (strikes(FaultKind::kSubmit)) throw SystemError(EIO, "injected failure of a start");
    const auto buffer = buffers_.get(handle);
    // XRT reuses a packet as soon as it sees there that its run has ended.
    const std::scoped_lock lock(mutex_);
    ert_packet* const packet = packet_of(*buffer);
    if (packet->opcode != ERT_START_CU) {  // such packets configure the scheduler, which is not emulated
        end(*packet, ERT_CMD_STATE_COMPLETED);
        return;
    }
    const std::size_t num_masks = 1 + reinterpret_cast<const ert_start_kernel_cmd*>(packet)->extra_cu_masks;
    const auto payload = payload_of(*packet);
    const auto registers = payload.subspan(num_masks);
    ComputeUnit& unit = unit_for(payload.first(num_masks));
    const std::int64_t number = next_run_++;
    packet->state = ERT_CMD_STATE_QUEUED;
    journal().note(index_, "run-queued", number, unit.name());
    unit.submit({.number = number, .packet = buffer, .registers = {registers.begin(), registers.end()}});
}

ComputeUnit& Card::unit_for(std::span<const std::uint32_t> masks) {
    ComputeUnit* least_busy = nullptr;
    for (std::size_t index = 0; index < units_.size() && index / 32 < masks.size(); ++index) {
        if ((masks[index / 32] >> (index % 32) & 1) == 0) continue;
        ComputeUnit* unit = units_[index].get();
        if (least_busy == nullptr || unit->num_waiting() < least_busy->num_waiting()) least_busy = unit;
    }
    if (least_busy == nullptr) throw SystemError(EINVAL, "no such compute unit");
    return *least_busy;
}

bool Card::wait(std::chrono::milliseconds timeout) {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_for(lock, timeout, [this] { return num_ended_ > 0; })) return false;
    --num_ended_;
    return true;
}

void Card::execute(const ComputeUnit& unit, const Run& run) {
    ++counters_.runs_begun;
    const std::int64_t before = releases();
    begin(run);
    journal().note(index_, "run-begin", run.number, unit.name());
    const Outcome outcome = attempt(unit, run, before);
    ++(outcome.state == ERT_CMD_STATE_COMPLETED ? counters_.runs_completed : counters_.runs_failed);
    journal().note(index_, "run-end", run.number, unit.name(), name_of(outcome.state), outcome.reason);
    finish(run, outcome.state);
}

Card::Outcome Card::attempt(const ComputeUnit& unit, const Run& run, std::int64_t before) {
    if (strikes(FaultKind::kLost)) lose();
    if (strikes(FaultKind::kHang)) await_release("run-hung", static_cast<std::uint64_t>(run.number));
    if (lost_) return {ERT_CMD_STATE_ABORT, "the card is lost"};
    try {
        return compute(unit, run, before);
    } catch (const std::exception& error) {
        return {ERT_CMD_STATE_ERROR, error.what()};
    }
}

void Card::begin(const Run& run) {
    const std::scoped_lock lock(mutex_);
    if (const auto packet = run.packet.lock()) packet_of(*packet)->state = ERT_CMD_STATE_RUNNING;
}

Card::Outcome Card::compute(const ComputeUnit& unit, const Run& run, std::int64_t before) {
    const auto begin = Clock::now();
    RunMemory memory(*banks_.front(), [this](std::uint64_t address) { return own_host_memory(address); });
    unit.compute(run, memory);
    const bool error = strikes(FaultKind::kError), abort = strikes(FaultKind::kAbort);
    if (error || abort) memory.poison_written();
    memory.finish();
    if (const auto fault = faults_.strike(FaultKind::kCorrupt)) {
        corrupt(*fault, memory.address(fault->pointer, fault->bit_offset / 8));
    }
    const auto time =
        std::chrono::microseconds(settings_.latency_us) + time_of(memory.bytes(), settings_.kernel_mib_per_s);
    pause(time - (Clock::now() - begin), before);
    if (error) return {ERT_CMD_STATE_ERROR, "injected"};
    if (abort) return {ERT_CMD_STATE_ABORT, "injected"};
    const std::string trespass = memory.trespass();
    return {trespass.empty() ? ERT_CMD_STATE_COMPLETED : ERT_CMD_STATE_ERROR, trespass};
}

std::span<std::byte> Card::own_host_memory(std::uint64_t address) const {
    const auto buffer = buffers_.at(address);
    if (buffer == nullptr || buffer->kind() != BufferKind::kNormal) return {};
    return std::span(buffer->host(), buffer->bytes()).subspan(address - buffer->address());
}

void Card::corrupt(const Fault& fault, std::uint64_t address) {
    std::byte& wrong = *banks_.front()->at(address);
    wrong ^= std::byte{1} << (fault.bit_offset % 8);
    journal().note(index_, "corrupt", address);
}

void Card::finish(const Run& run, unsigned state) {
    const std::scoped_lock lock(mutex_);
    // The packet may be gone: XRT frees the packets of runs that it no longer waits for.
    if (const auto packet = run.packet.lock()) end(*packet_of(*packet), state);
}

void Card::end(ert_packet& packet, unsigned state) {
    packet.state = state;
    ++num_ended_;
    ended_.notify_all();
}

}  // namespace smart_infinity::emulator
