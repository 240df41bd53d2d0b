#pragma once

// One table of kernels per instruction set, all compiled from kernels.inl.
//
// This header is included by translation units that are compiled for newer instruction sets than the CPU may have, so
// it holds plain structs only: an inline function here could be emitted with those instructions and be picked by the
// linker for everybody.

#include <cstddef>

#include "dtype.hpp"

namespace smart_infinity {

// The scalars of one hyperparameter set at one step, computed in double by the caller and rounded once.
struct AdamStep {
    float gradient_scale;
    float beta1;  // implied by one_minus_beta1; kept because both belong to the hyperparameter set
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float decay;      // 1 - lr * weight_decay (AdamW), else 1
    float l2;         // weight_decay (Adam), else 0
    float step_size;  // lr / (1 - beta1 ** step)
    float inverse_sqrt_bias_correction2;
    float eps;
};

// First elements of a run. The arrays must not overlap.
struct AdamArrays {
    float* master;
    float* exp_avg;
    float* exp_avg_sq;
    const void* gradient;
    void* parameter;
};

constexpr std::size_t kNoParameter = kNumDTypes;  // column of Kernels::adam that writes no parameter

struct Kernels {
    using Adam = void (*)(const AdamStep& step, const AdamArrays& arrays, std::size_t numel);
    using Widen = void (*)(const void* values, float* out, std::size_t numel);
    using Narrow = void (*)(const float* values, void* out, std::size_t numel);
    using SumOfSquares = double (*)(const void* values, std::size_t numel);

    Adam adam[kNumDTypes][kNumDTypes + 1];  // [gradient dtype][parameter dtype or kNoParameter]
    Widen widen[kNumDTypes];
    Narrow narrow[kNumDTypes];
    SumOfSquares sum_of_squares[kNumDTypes];
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace smart_infinity
