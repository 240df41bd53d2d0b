#pragma once

#include <cstddef>
#include <memory>

#include "base/host_registrar.hpp"
#include "base/process.hpp"

namespace smart_infinity {

constexpr std::size_t kBlockBytes = 4096;  // unit of O_DIRECT's addresses, offsets and lengths
constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::size_t align_up(std::size_t value, std::size_t alignment) {
    return (value + alignment - 1) / alignment * alignment;
}

// The system's page size, rounded up to a multiple of kBlockBytes. It is 16 or 64 KiB on some machines.
std::size_t page_bytes();

// Whether the system may refuse memory that is not used yet.
enum class Reserve { kAll, kNothing };

// Zero-filled memory for direct I/O. It is page-aligned, or aligned to huge pages if it is as large as one, and absent
// from forked children (a child's copy-on-write would move pages while I/O uses them).
class HostBuffer {
 public:
    explicit HostBuffer(std::size_t bytes, Reserve reserve = Reserve::kAll);
    ~HostBuffer();
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

    // Returns whole pages to the system: they take no memory, and read as zero, until they are used again. The system
    // rounds the end of the range up. Returns whether it succeeded.
    bool give_back(std::size_t offset, std::size_t bytes) noexcept;

    // Registers the memory, so that copies are asynchronous; they also work without it. Returns whether it succeeded;
    // the registrar keeps the reason. Throws std::invalid_argument if the memory is registered already.
    bool try_register(std::shared_ptr<const HostRegistrar> registrar);
    // Unregisters the memory if it is registered. The destructor does so before it unmaps the memory.
    void unregister();

 private:
    std::byte* data_;
    std::size_t bytes_;
    std::shared_ptr<const HostRegistrar> registrar_;
    Process process_;
};

}  // namespace smart_infinity
