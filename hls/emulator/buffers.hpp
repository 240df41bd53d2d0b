#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "card_memory.hpp"

namespace smart_infinity::emulator {

enum class BufferKind {
    kNormal,      // memory on both sides, copied by syncs
    kDeviceOnly,  // no host memory
    kP2p,         // host addresses that map the card's memory
    kCommand,     // host memory only: a packet that starts a run
};

// A buffer object that XRT allocates, maps and syncs.
class Buffer {
 public:
    // user_memory: host memory that the host provides, or null.
    Buffer(BufferKind kind, std::size_t bytes, unsigned flags, void* user_memory, std::shared_ptr<CardMemory> memory,
           std::uint64_t limit_bytes);
    ~Buffer();
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;

    BufferKind kind() const { return kind_; }
    std::size_t bytes() const { return bytes_; }
    unsigned flags() const { return flags_; }
    std::uint64_t address() const { return address_; }
    bool on_card() const { return memory_ != nullptr; }
    std::byte* host() const { return host_; }  // null if it has none
    std::byte* device() const { return memory_->at(address_); }

 private:
    const BufferKind kind_;
    const std::size_t bytes_;
    const unsigned flags_;
    std::shared_ptr<CardMemory> memory_;
    std::uint64_t address_ = ~std::uint64_t{0};
    Mapping own_host_memory_;
    std::byte* host_ = nullptr;
};

// All buffers of a card by handle.
class Buffers {
 public:
    unsigned add(std::shared_ptr<Buffer> buffer);
    void remove(unsigned handle);
    // Throws SystemError (ENOENT) if there is no such buffer.
    std::shared_ptr<Buffer> get(unsigned handle) const;
    // The buffer on the card whose allocation holds an address; null if there is none.
    std::shared_ptr<Buffer> at(std::uint64_t address) const;

    std::size_t num_buffers() const;
    std::size_t card_bytes() const;

 private:
    mutable std::mutex mutex_;
    unsigned next_ = 1;
    std::map<unsigned, std::shared_ptr<Buffer>> buffers_;
};

}  // namespace smart_infinity::emulator
