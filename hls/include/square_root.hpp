// The one operation that C++ and Vitis HLS spell differently.
#pragma once

#ifdef __SYNTHESIS__
#include <hls_math.h>
#else
#include <cmath>
#endif

namespace card {

inline float square_root(float value) {
#pragma HLS INLINE
#ifdef __SYNTHESIS__
    return hls::sqrt(value);
#else
    return std::sqrt(value);
#endif
}

}  // namespace card
