#include "buffers.hpp"

#include <cerrno>
#include <cstring>

#include "base/system_error.hpp"

namespace smart_infinity::emulator {

Buffer::Buffer(BufferKind kind, std::size_t bytes, unsigned flags, void* user_memory,
               std::shared_ptr<CardMemory> memory, std::uint64_t limit_bytes)
    : kind_(kind), bytes_(bytes), flags_(flags), host_(static_cast<std::byte*>(user_memory)) {
    if (host_ == nullptr && (kind == BufferKind::kNormal || kind == BufferKind::kCommand)) {
        own_host_memory_ = Mapping(round_up(bytes, kPageBytes));
        host_ = own_host_memory_.data();
    }
    if (kind == BufferKind::kCommand) return;  // XRT relies on zeros in it
    address_ = memory->allocate(bytes, limit_bytes);
    memory_ = std::move(memory);
    if (kind == BufferKind::kP2p) host_ = device();
    if (own_host_memory_.data() != nullptr) std::memset(host_, kHostPoison, bytes);
}

Buffer::~Buffer() {
    if (on_card()) memory_->release(address_);
}

unsigned Buffers::add(std::shared_ptr<Buffer> buffer) {
    const std::scoped_lock lock(mutex_);
    buffers_.emplace(next_, std::move(buffer));
    return next_++;
}

void Buffers::remove(unsigned handle) {
    const std::scoped_lock lock(mutex_);
    buffers_.erase(handle);
}

std::shared_ptr<Buffer> Buffers::get(unsigned handle) const {
    const std::scoped_lock lock(mutex_);
    const auto found = buffers_.find(handle);
    if (found == buffers_.end()) throw SystemError(ENOENT, "no such buffer");
    return found->second;
}

std::shared_ptr<Buffer> Buffers::at(std::uint64_t address) const {
    const std::scoped_lock lock(mutex_);
    for (const auto& [_, buffer] : buffers_) {
        if (buffer->on_card() && address >= buffer->address() && address - buffer->address() < buffer->bytes()) {
            return buffer;
        }
    }
    return nullptr;
}

std::size_t Buffers::num_buffers() const {
    const std::scoped_lock lock(mutex_);
    std::size_t count = 0;
    for (const auto& [_, buffer] : buffers_) count += buffer->on_card() ? 1 : 0;
    return count;
}

std::size_t Buffers::card_bytes() const {
    const std::scoped_lock lock(mutex_);
    std::size_t bytes = 0;
    for (const auto& [_, buffer] : buffers_) bytes += buffer->on_card() ? buffer->bytes() : 0;
    return bytes;
}

}  // namespace smart_infinity::emulator
