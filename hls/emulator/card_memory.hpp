#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "mapping.hpp"

namespace smart_infinity::emulator {

// Values of unwritten memory. Device and host differ, so that a missing sync shows in either direction.
inline constexpr int kDevicePoison = 0xa5;
inline constexpr int kHostPoison = 0x5a;

struct Range {
    std::uint64_t begin;
    std::uint64_t end;
};

// The card's DRAM: a file in memory, so that a part of it can be mapped a second time, between guards.
class CardMemory {
 public:
    CardMemory(std::uint64_t base, std::uint64_t bytes);
    ~CardMemory();
    CardMemory(const CardMemory&) = delete;
    CardMemory& operator=(const CardMemory&) = delete;

    // Returns the address of poisoned memory; throws std::bad_alloc if there is no room below limit_bytes.
    std::uint64_t allocate(std::uint64_t bytes, std::uint64_t limit_bytes);
    void release(std::uint64_t address);

    // Returns the allocation that holds an address, without padding; empty if there is none.
    Range allocation(std::uint64_t address) const;
    std::byte* at(std::uint64_t address) const { return mapping_.data() + (address - base_); }

    int file() const { return file_; }
    std::uint64_t file_offset(std::uint64_t address) const { return address - base_; }

 private:
    const std::uint64_t base_;
    const std::uint64_t bytes_;
    const int file_;
    Mapping mapping_;
    mutable std::mutex mutex_;
    std::map<std::uint64_t, std::uint64_t> allocations_;  // address to bytes
};

}  // namespace smart_infinity::emulator
