// The part of Vitis HLS's hls_math.h that the kernels use.
#pragma once

#include <cmath>

namespace hls {

inline float sqrt(float value) { return std::sqrt(value); }

}  // namespace hls
