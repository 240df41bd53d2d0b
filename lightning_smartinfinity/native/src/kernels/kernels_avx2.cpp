#include "kernels/kernels.hpp"

#define SMART_INFINITY_KERNELS kAvx2Kernels
#include "kernels/kernels.inl"
