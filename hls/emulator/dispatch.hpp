#pragma once

#include <array>
#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <utility>

#include "compute_unit.hpp"

namespace smart_infinity::emulator {

// Reads arguments where Vitis puts them for ap_ctrl_hs: from 0x10 on, each followed by four reserved bytes.
class RegisterReader {
 public:
    explicit RegisterReader(std::span<const std::uint32_t> registers) : registers_(std::as_bytes(registers)) {}

    std::uint64_t next(std::size_t bytes) {
        if (offset_ + bytes > registers_.size()) throw std::invalid_argument("fewer arguments than the kernel has");
        std::uint64_t value = 0;
        std::memcpy(&value, registers_.data() + offset_, bytes);
        offset_ += bytes + kReservedBytes;
        return value;
    }

 private:
    static constexpr std::size_t kFirstOffset = 0x10;
    static constexpr std::size_t kReservedBytes = 4;

    std::span<const std::byte> registers_;
    std::size_t offset_ = kFirstOffset;
};

template <class Argument>
inline constexpr std::size_t kRegisterBytes = std::is_pointer_v<Argument> ? 8 : sizeof(Argument);

template <class Argument>
Argument next_argument(const std::uint64_t*& value, const PointerArgument*& pointer) {
    [[maybe_unused]] const std::uint64_t* const here = value++;
    if constexpr (std::is_pointer_v<Argument>) {
        return reinterpret_cast<Argument>((pointer++)->memory);
    } else {
        static_assert(std::is_trivially_copyable_v<Argument> && (sizeof(Argument) == 4 || sizeof(Argument) == 8),
                      "XRT passes scalars of one or two words");
        Argument argument;
        std::memcpy(&argument, here, sizeof argument);
        return argument;
    }
}

// Calls a kernel of any signature with the values in its registers.
template <class... Arguments>
void dispatch(void (*kernel)(Arguments...), std::span<const std::uint32_t> registers, DeviceMemory& memory) {
    RegisterReader reader(registers);
    const std::array<std::uint64_t, sizeof...(Arguments)> values{reader.next(kRegisterBytes<Arguments>)...};

    constexpr std::size_t kNumPointers = (std::size_t{std::is_pointer_v<Arguments>} + ... + 0);
    std::array<PointerArgument, kNumPointers> pointers{};
    std::size_t argument = 0, next = 0;
    const auto collect = [&](bool is_pointer, bool written) {
        if (is_pointer) pointers[next++] = {values[argument], written};
        ++argument;
    };
    (collect(std::is_pointer_v<Arguments>, !std::is_const_v<std::remove_pointer_t<Arguments>>), ...);
    memory.map(pointers);

    const std::uint64_t* value = values.data();
    const PointerArgument* pointer = pointers.data();
    // Braces evaluate from left to right.
    const std::tuple<Arguments...> call{next_argument<Arguments>(value, pointer)...};
    std::apply(kernel, call);
}

}  // namespace smart_infinity::emulator

#define SMART_INFINITY_COMPUTE_UNIT(kernel)                                                         \
    extern "C" __attribute__((visibility("default"))) void smart_infinity_compute_unit_##kernel(    \
        std::span<const std::uint32_t> registers, smart_infinity::emulator::DeviceMemory& memory) { \
        smart_infinity::emulator::dispatch(kernel, registers, memory);                              \
    }                                                                                               \
    static_assert(                                                                                  \
        std::is_same_v<decltype(smart_infinity_compute_unit_##kernel), smart_infinity::emulator::RunComputeUnit>)
