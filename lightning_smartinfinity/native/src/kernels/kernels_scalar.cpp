#include "kernels/kernels.hpp"

#define SMART_INFINITY_KERNELS kScalarKernels
#include "kernels/kernels.inl"
