// The part of Vitis HLS's hls::vector that the kernels use.
#pragma once

#include <cstddef>

namespace hls {

template <class T, std::size_t kSize>
class alignas(kSize * sizeof(T)) vector {
 public:
    vector() = default;
    vector(T value) {  // fills the vector, as in Vitis HLS
        for (T& element : elements_) element = value;
    }
    T& operator[](std::size_t index) { return elements_[index]; }
    const T& operator[](std::size_t index) const { return elements_[index]; }

 private:
    static_assert((kSize & (kSize - 1)) == 0, "a memory port's width is a power of two");
    T elements_[kSize];
};

}  // namespace hls
