#pragma once

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
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Mapping();

    static Mapping of_file(int file, std::size_t bytes);
    static Mapping anonymous(std::size_t bytes);
    static Mapping inaccessible(std::size_t bytes);  // reserves addresses only

    std::byte* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }

 private:
    Mapping(std::size_t bytes, int protection, int flags, int file);

    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace smart_infinity::emulator
