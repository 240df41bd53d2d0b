#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "buffers.hpp"
#include "compute_units.hpp"
#include "counters.hpp"
#include "faults.hpp"
#include "settings.hpp"

struct axlf;
struct ert_packet;

namespace smart_infinity::emulator {

enum class Direction { kToCard, kFromCard };

// An emulated card: the functions of its driver for XRT, and those that tests call. It raises the errors of the driver,
// SystemError and std::bad_alloc.
class Card {
 public:
    explicit Card(unsigned index) : index_(index), faults_(index) {}

    void load(const axlf& file);
    unsigned allocate(std::size_t bytes, unsigned flags, void* user_memory);
    void free(unsigned handle);
    void* map(unsigned handle) const;
    void sync(unsigned handle, Direction direction, std::size_t bytes, std::size_t offset);
    void copy(unsigned to, unsigned from, std::size_t bytes, std::size_t to_offset, std::size_t from_offset);
    std::shared_ptr<Buffer> buffer(unsigned handle) const { return buffers_.get(handle); }
    void submit(unsigned packet);
    // Returns whether a run ended within that time.
    bool wait(std::chrono::milliseconds timeout);

    Settings& settings() { return settings_; }
    Faults& faults() { return faults_; }
    void lose();
    // Lets hung runs continue; runs in progress take no longer than they compute.
    void release();
    // Restores the first state, except for settings, the loaded xclbin and buffers.
    void reset();
    std::int64_t counter(std::string_view name) const;

 private:
    struct Outcome {
        unsigned state;
        std::string reason;  // why it failed; empty if it succeeded
    };
    using Clock = std::chrono::steady_clock;

    void check_present() const;
    bool strikes(FaultKind kind) { return faults_.strike(kind).has_value(); }
    BufferKind kind_of(unsigned flags) const;
    // In these functions `before` is the number of releases when the run or sync began.
    void move(const Buffer& buffer, Direction direction, std::size_t bytes, std::size_t offset, std::int64_t before);
    bool pause(Clock::duration time, std::int64_t before);  // returns whether the card was released
    std::int64_t releases() const;
    void wait_for_channel(Clock::time_point begin, Clock::duration time, std::int64_t before);
    static Clock::time_point end_of_turn(Clock::time_point begin, Clock::duration time);
    static Clock::duration time_of(std::uint64_t bytes, std::int64_t mib_per_s);
    ComputeUnit& unit_for(std::span<const std::uint32_t> masks);
    void execute(const ComputeUnit& unit, const Run& run);
    Outcome attempt(const ComputeUnit& unit, const Run& run, std::int64_t before);
    Outcome compute(const ComputeUnit& unit, const Run& run, std::int64_t before);
    void await_release(const char* event, std::uint64_t what);
    std::span<std::byte> own_host_memory(std::uint64_t address) const;
    void corrupt(const Fault& fault, std::uint64_t address);
    void begin(const Run& run);
    void finish(const Run& run, unsigned state);
    void end(ert_packet& packet, unsigned state);

    const unsigned index_;
    Settings settings_;
    Faults faults_;
    Counters counters_{};
    std::atomic<bool> lost_ = false;
    Buffers buffers_;

    mutable std::mutex mutex_;
    std::condition_variable ended_;
    std::condition_variable released_;
    std::int64_t num_ended_ = 0;  // ended runs for which no caller has waited yet
    std::int64_t num_releases_ = 0;
    std::int64_t next_run_ = 0;
    std::string uuid_;
    std::vector<std::shared_ptr<CardMemory>> banks_;
    std::mutex to_card_, from_card_;  // one DMA channel in each direction

    std::vector<std::unique_ptr<ComputeUnit>> units_;  // last, because their threads use the other members
};

// Returns the card of that number; it lives as long as the process, since compute units may hang.
Card& card(unsigned index);

}  // namespace smart_infinity::emulator
