#include "kernels.hpp"

#define SMART_INFINITY_KERNELS kAvx2Kernels
#include "kernels.inl"
