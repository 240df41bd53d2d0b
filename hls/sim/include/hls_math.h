// What the kernels use of Vitis HLS's hls_math.h.
#pragma once

#include <cmath>

namespace hls {

inline float sqrt(float value) { return std::sqrt(value); }

}  // namespace hls
