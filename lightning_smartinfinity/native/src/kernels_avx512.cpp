#include "kernels.hpp"

#define SMART_INFINITY_KERNELS kAvx512Kernels
#include "kernels.inl"
