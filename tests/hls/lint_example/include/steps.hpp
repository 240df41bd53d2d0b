#pragma once

#include <hls_stream.h>
#include <hls_vector.h>

#include <cstdint>

using Beat = hls::vector<float, 16>;
constexpr int kDepth = 64;

template <class T>
void load(const T* source, hls::stream<T>& out, std::uint32_t beats) {
#pragma HLS INLINE off
    for (std::uint32_t i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 65536
        out.write(source[i]);
    }
}

template <class T>
void store(T* target, hls::stream<T>& in, std::uint32_t beats) {
#pragma HLS INLINE off
    for (std::uint32_t i = 0; i < beats; ++i) {
#pragma HLS PIPELINE II = 1
#pragma HLS LOOP_TRIPCOUNT min = 1 max = 65536
        target[i] = in.read();
    }
}
