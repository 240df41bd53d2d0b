#include "kernels/kernels.hpp"

#define SMART_INFINITY_KERNELS kAvx512Kernels
#include "kernels/kernels.inl"
