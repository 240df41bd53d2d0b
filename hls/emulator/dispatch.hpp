#pragma once

#include <cstring>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

#include "compute_unit.hpp"

namespace smart_infinity::emulator {

// Reads arguments where Vitis puts them for ap_ctrl_hs: from 0x10 on, each followed by four reserved bytes.
class RegisterReader {
 public:
    explicit RegisterReader(std::span<const std::uint32_t> registers) : registers_(std::as_bytes(registers)) {}

    template <class Value>
    Value next() {
        static_assert(std::is_trivially_copyable_v<Value> && (sizeof(Value) == 4 || sizeof(Value) == 8),
                      "XRT passes scalars of one or two words");
        if (offset_ + sizeof(Value) > registers_.size()) {
            throw std::invalid_argument("fewer arguments than the kernel has");
        }
        Value value;
        std::memcpy(&value, registers_.data() + offset_, sizeof value);
        offset_ += sizeof value + kReservedBytes;
        return value;
    }

 private:
    static constexpr std::size_t kFirstOffset = 0x10;
    static constexpr std::size_t kReservedBytes = 4;

    std::span<const std::byte> registers_;
    std::size_t offset_ = kFirstOffset;
};

// Returns the next argument of a kernel; in place of a pointer null, which `reach` replaces.
template <class Argument>
Argument next_argument(RegisterReader& reader, std::vector<PointerArgument>& pointers) {
    if constexpr (std::is_pointer_v<Argument>) {
        const bool written = !std::is_const_v<std::remove_pointer_t<Argument>>;
        pointers.push_back({reader.next<std::uint64_t>(), written});
        return nullptr;
    } else {
        return reader.next<Argument>();
    }
}

template <class Argument>
void reach(Argument& argument, const PointerArgument*& next) {
    if constexpr (std::is_pointer_v<Argument>) argument = reinterpret_cast<Argument>((next++)->memory);
}

// Calls a kernel of any signature with the values in its registers.
template <class... Arguments>
void dispatch(void (*kernel)(Arguments...), std::span<const std::uint32_t> registers, DeviceMemory& memory) {
    RegisterReader reader(registers);
    std::vector<PointerArgument> pointers;
    // Braces evaluate from left to right.
    std::tuple<Arguments...> call{next_argument<Arguments>(reader, pointers)...};
    memory.map(pointers);
    const PointerArgument* next = pointers.data();
    std::apply([&next](Arguments&... argument) { (reach(argument, next), ...); }, call);
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
