#pragma once

#include <cstddef>
#include <cstdint>

namespace smart_infinity {

enum class DType : std::uint8_t { kFloat32, kFloat16, kBFloat16 };

constexpr std::size_t kNumDTypes = 3;

constexpr std::size_t item_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace smart_infinity
