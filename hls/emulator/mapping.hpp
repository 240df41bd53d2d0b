#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace smart_infinity::emulator {

inline constexpr std::size_t kPageBytes = 4096;

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t to) { return (value + to - 1) / to * to; }

// Memory that this process maps, and unmaps at the end. All sizes are multiples of a page.
class Mapping {
 public:
    Mapping() = default;
    // protection: PROT_NONE reserves addresses only. file: a descriptor; without one the memory is zeros.
    explicit Mapping(std::size_t bytes, int protection = PROT_READ | PROT_WRITE, int file = -1);
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapping();

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

 private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace smart_infinity::emulator
