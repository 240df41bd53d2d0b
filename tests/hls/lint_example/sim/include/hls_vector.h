#pragma once

#include <cstddef>

namespace hls {
template <class T, std::size_t N>
struct alignas(sizeof(T) * N) vector {
    T lanes[N];
    T& operator[](std::size_t lane) { return lanes[lane]; }
};
}  // namespace hls
