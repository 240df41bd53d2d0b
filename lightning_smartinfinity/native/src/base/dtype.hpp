#pragma once

#include <cstddef>
#include <cstdint>

namespace smart_infinity {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };

constexpr std::size_t kNumDTypes = 3;

constexpr std::size_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType dtype) {
    constexpr const char* kNames[kNumDTypes] = {"fp32", "fp16", "bf16"};
    return kNames[static_cast<std::size_t>(dtype)];
}

}  // namespace smart_infinity
