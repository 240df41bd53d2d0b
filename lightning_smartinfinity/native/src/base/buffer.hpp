#pragma once

#include <cstddef>
#include <memory>

#include "base/host_registrar.hpp"
#include "base/process.hpp"

namespace smart_infinity {

constexpr std::size_t kBlockBytes = 4096;  // what O_DIRECT wants addresses, offsets and lengths to be multiples of
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// Zero-filled memory for direct I/O: page-aligned, at a huge page when it holds one, and absent from forked children
// (a child's copy-on-write would move pages under I/O in flight).
class HostBuffer {
 public:
    explicit HostBuffer(std::size_t bytes);
    ~HostBuffer();
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

    // Registers the memory, so that copies are asynchronous; once. Copies work without it, too. Returns whether it
    // worked; the registrar remembers why not.
    bool try_register(std::shared_ptr<const HostRegistrar> registrar);
    // Idempotent, and done before the memory is unmapped.
    void unregister();

 private:
    std::byte* data_;
    std::size_t bytes_;
    std::shared_ptr<const HostRegistrar> registrar_;
    Process process_;
};

}  // namespace smart_infinity
