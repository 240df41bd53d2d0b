#pragma once

#include <atomic>
#include <cstdint>
#include <string_view>

namespace smart_infinity::emulator {

inline constexpr unsigned kMaxCards = 16;

// How a card behaves; each setting may change while it runs. Environment: SMART_INFINITY_CARD_<NAME>.
struct Settings {
    Settings();

    // Throws std::invalid_argument if there is no such setting.
    void set(std::string_view name, std::int64_t value);

    std::atomic<std::int64_t> dram_mib = 4096;
    std::atomic<std::int64_t> p2p = 1;                // 0: not enabled
    std::atomic<std::int64_t> latency_us = 0;         // of a run, added to the time that the kernel takes here
    std::atomic<std::int64_t> dma_mib_per_s = 0;      // of syncs in each direction; 0: the speed of memory
    std::atomic<std::int64_t> channel_mib_per_s = 0;  // of the syncs of all cards in both directions; 0: no limit
    std::atomic<std::int64_t> kernel_mib_per_s = 0;   // of the buffers of a run; 0: the speed of computing here
};

// Number of cards in the machine: SMART_INFINITY_CARD_COUNT, or the number that was set last.
unsigned num_cards();
void set_num_cards(unsigned count);

}  // namespace smart_infinity::emulator
