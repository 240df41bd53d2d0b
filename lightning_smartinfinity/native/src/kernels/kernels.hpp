#pragma once

// One table of kernels per instruction set, all compiled from kernels.inl.
//
// This header is included by translation units that are compiled for newer instruction sets than the CPU may have, so
// it holds plain structs only: an inline function here could be emitted with those instructions and be picked by the
// linker for everybody.

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/update_rules.hpp"  // generated

namespace smart_infinity {

// First elements of a run. The memory of one must not overlap that of another.
struct UpdateArrays {
    float* arrays[kMaxRuleArrays];  // the master, then what the rule keeps besides
    const void* gradient;
    void* parameter;
};

// Elements of the partition's grid: each cell has its own random bits, and no more of them share an exponent.
constexpr std::size_t kCellNumel = 256;

// Elements of a cell, and what their random bits are made of.
struct CellPart {
    std::uint32_t key;
    std::uint32_t first;  // in the cell
    std::size_t numel;
};

// Of a block-scaled gradient: the largest that a block's exponent may be, so that 127 times the scale is finite. The
// scale is 2**(exponent - 127).
constexpr std::uint32_t kLargestScale = 248;

// A block of 8-bit codes, and the exponent that they share.
struct Codes {
    std::uint8_t* codes;
    std::uint8_t* exponent;
};

constexpr std::size_t kNoParameter = kNumDTypes;  // column of an Updates that writes no parameter

// One rule's kernels: [gradient dtype][parameter dtype or kNoParameter].
template <class Step>
struct Updates {
    using Kernel = void (*)(const Step& step, const UpdateArrays& arrays, std::size_t numel);
    Kernel table[kNumDTypes][kNumDTypes + 1];
};

template <class... Steps>
struct UpdatesOf : Updates<Steps>... {};

struct Kernels {
    using Widen = void (*)(const void* values, float* out, std::size_t numel);
    using Narrow = void (*)(const float* values, void* out, std::size_t numel);
    using SumOfSquares = double (*)(const void* values, std::size_t numel);
    using Accumulate = double (*)(const void* gradient, void* sum, std::size_t numel, bool adds);
    using RoundBf16 = void (*)(const float* exp_avg, const float* exp_avg_sq, std::uint16_t* exp_avg_out,
                               std::uint16_t* exp_avg_sq_out, const CellPart& cell);
    using RoundInt8 = void (*)(const float* exp_avg, const float* exp_avg_sq, const Codes& exp_avg_out,
                               const Codes& exp_avg_sq_out, const CellPart& cell);
    using Encode = void (*)(const float* values, const Codes& out, std::size_t numel);
    using Decode = void (*)(const Codes& codes, float* out, std::size_t numel);
    using Split = void (*)(const float* values, std::uint16_t* parameter, std::uint16_t* remainder, std::size_t numel);
    using Join = void (*)(const std::uint16_t* parameter, const std::uint16_t* remainder, float* out,
                          std::size_t numel);
    using AddResidual = void (*)(const void* gradient, const float* residual, float scale, float* out,
                                 std::size_t numel);
    using FeedResidual = void (*)(const void* gradient, const float* sent, float scale, float* residual,
                                  std::size_t numel);
    using Collect = std::size_t (*)(const float* values, std::size_t numel, std::uint32_t least, std::uint32_t first,
                                    std::uint32_t* elements, float* out);
    using EncodeGradient = void (*)(const float* values, std::size_t numel, std::int8_t* codes, std::uint8_t* exponent);
    using DecodeGradient = void (*)(const std::int8_t* codes, std::uint8_t exponent, float* out, std::size_t numel);

    OfSteps<UpdatesOf> updates;  // an Updates<Step> for each rule
    Widen widen[kNumDTypes];
    Narrow narrow[kNumDTypes];
    SumOfSquares sum_of_squares[kNumDTypes];
    // [gradient dtype][sum's dtype]: the gradient becomes the sum, or is added to it; returns the sum's squares.
    Accumulate accumulate[kNumDTypes][kNumDTypes];

    // State formats. A block has at most kCellNumel elements.
    RoundBf16 round_bf16;   // stochastically
    RoundInt8 round_int8;   // stochastically
    Encode encode_exp_avg;  // to nearest
    Encode encode_exp_avg_sq;
    Decode decode_exp_avg;
    Decode decode_exp_avg_sq;
    Split split;  // fp32 into its bf16 and a remainder
    Join join;

    // Compressed gradients.
    AddResidual add_residual[kNumDTypes];    // out = gradient + residual * scale
    FeedResidual feed_residual[kNumDTypes];  // residual = (gradient + residual * scale - sent) / scale
    // Values whose magnitude's bits are at least `least`, and their elements, of which the first is `first`. Returns
    // how many, and has then written up to `numel`.
    Collect collect;
    EncodeGradient encode_gradient;  // a block of at most kCellNumel elements
    DecodeGradient decode_gradient;
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace smart_infinity
