#pragma once

// Declares one table of kernels for each instruction set, all compiled from kernels.inl.
//
// Translation units compiled for newer instruction sets than the CPU may have include this header, so it contains only
// plain structs: the linker could choose such a unit's version of an inline function for the whole program.

#include <cstddef>
#include <cstdint>

#include "base/dtype.hpp"
#include "kernels/update_rules.hpp"  // generated

namespace smart_infinity {

// Pointers to the first elements of a run. The memory of different arrays must not overlap.
struct UpdateArrays {
    float* arrays[kMaxRuleArrays];  // the master, then the rule's other arrays
    const void* gradient;
    void* parameter;
};

// Number of elements in a cell of the partition's grid. Each cell has its own random bits, and a block of elements that
// share an exponent is no larger than a cell.
constexpr std::size_t kCellNumel = 256;

// Part of a cell, and the key of its random bits.
struct CellPart {
    std::uint32_t key;
    std::uint32_t first;  // position of the first element in the cell
    std::size_t numel;
};

// The largest exponent of a block in a block-scaled gradient, chosen so that 127 times its scale is finite. The scale
// is 2**(exponent - 127).
constexpr std::uint32_t kLargestScale = 248;

// A block of 8-bit codes, and the exponent that they share.
struct Codes {
    std::uint8_t* codes;
    std::uint8_t* exponent;
};

// Running sums of squares, all zero before the first call; see kernels.inl for their order.
constexpr std::size_t kSquareLanes = 32;
struct SquareSums {
    double lanes[kSquareLanes];
};

constexpr std::size_t kNoParameter = kNumDTypes;  // column of the kernels that write no parameter

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
    using SumOfSquares = double (*)(const void* values, std::size_t numel, SquareSums* sums);
    using Accumulate = double (*)(const void* gradient, void* sum, std::size_t numel, bool adds, SquareSums* sums);
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
    // Continues running sums, and returns their total. A run may be cut into calls anywhere at multiples of
    // kSquareLanes: the result is that of one call.
    SumOfSquares sum_of_squares[kNumDTypes];
    // [gradient dtype][sum's dtype]: stores the gradient as the sum, or adds it to the sum. Does the same as
    // sum_of_squares with the new sum; without `sums` it squares nothing and returns 0.
    Accumulate accumulate[kNumDTypes][kNumDTypes];

    // Kernels of state formats. A block has at most kCellNumel elements.
    RoundBf16 round_bf16;   // rounds stochastically
    RoundInt8 round_int8;   // rounds stochastically
    Encode encode_exp_avg;  // rounds to nearest
    Encode encode_exp_avg_sq;
    Decode decode_exp_avg;
    Decode decode_exp_avg_sq;
    Split split;  // splits fp32 into its bf16 and a remainder
    Join join;

    // Kernels of compressed gradients.
    AddResidual add_residual[kNumDTypes];    // out = gradient + residual * scale
    FeedResidual feed_residual[kNumDTypes];  // residual = (gradient + residual * scale - sent) / scale
    // Collects the values whose magnitude, compared as bits, is at least `least`, and their elements, counted from
    // `first`. Returns their number. The outputs need room for `numel` of them.
    Collect collect;
    EncodeGradient encode_gradient;  // a block of at most kCellNumel elements
    DecodeGradient decode_gradient;
};

extern const Kernels kScalarKernels;
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;

}  // namespace smart_infinity
