// The only source of the kernels. kernels_scalar.cpp, kernels_avx2.cpp and kernels_avx512.cpp compile it with the same
// floating-point rules (-ffp-contract=off, no -ffast-math), which makes them bit-equal. Loops are written for the
// auto-vectoriser.
//
// Everything is in an anonymous namespace and calls no library function, so that no symbol compiled for a newer
// instruction set can replace one from another translation unit.
//
// The conversions must be exact under FTZ + DAZ. They use integer logic, and use floating point only if no operand or
// result that matters is an fp32 subnormal.

#ifndef SMART_INFINITY_KERNELS
#error "define SMART_INFINITY_KERNELS, the name of the table, before including kernels.inl"
#endif

#include <type_traits>

namespace smart_infinity {
namespace {

using Bits = std::uint32_t;

inline Bits bits_of(float value) {
    Bits bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float float_of(Bits bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

struct Float32 {
    using Storage = float;
    static float widen(float value) { return value; }
    static float narrow(float value) { return value; }
};

struct BFloat16 {
    using Storage = std::uint16_t;

    static float widen(std::uint16_t value) { return float_of(Bits{value} << 16); }

    static std::uint16_t narrow(float value) {
        const Bits bits = bits_of(value);
        const Bits nearest_even = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        const Bits quiet_nan = (bits >> 16) | 0x40u;  // rounding could carry a NaN's payload into infinity
        return static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quiet_nan : nearest_even);
    }
};

struct Float16 {
    using Storage = std::uint16_t;

    static float widen(std::uint16_t value) {
        const Bits sign = (Bits{value} & 0x8000u) << 16;
        const Bits magnitude = Bits{value} & 0x7fffu;
        constexpr Bits kRebias = (127u - 15u) << 23;
        const Bits normal = (magnitude << 13) + kRebias;
        const Bits special = normal + kRebias;  // infinity and NaN: the exponent becomes all ones
        // A subnormal is its mantissa times 2**-24, which is a normal fp32 number: FTZ cannot touch it.
        const Bits subnormal = bits_of(static_cast<float>(static_cast<std::int32_t>(magnitude)) * 0x1p-24f);
        const Bits finite = magnitude < 0x400u ? subnormal : normal;
        return float_of(sign | (magnitude >= 0x7c00u ? special : finite));
    }

    static std::uint16_t narrow(float value) {
        const Bits sign = (bits_of(value) >> 16) & 0x8000u;
        const Bits magnitude = bits_of(value) & 0x7fffffffu;
        constexpr Bits kRebias = (127u - 15u) << 23;
        const Bits normal = (magnitude - kRebias + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        // 0.5 has an ulp of 2**-24, the unit of fp16 subnormals, so the addition rounds to nearest even. An fp32
        // subnormal that DAZ reads as zero would round to zero anyway.
        const Bits subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
        const Bits quiet_nan = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
        const Bits finite = magnitude < 0x38800000u ? subnormal : normal;
        const Bits number = magnitude >= 0x477ff000u ? 0x7c00u : finite;  // 65520 and more round to infinity
        return static_cast<std::uint16_t>(sign | (magnitude > 0x7f800000u ? quiet_nan : number));
    }
};

struct NotWritten {
    using Storage = float;
};

template <class Parameter>
struct IsWritten {
    static constexpr bool value = true;
};

template <>
struct IsWritten<NotWritten> {
    static constexpr bool value = false;
};

// torch.optim.Adam / AdamW, single-tensor order. kNearStart chooses torch.lerp's branch.
template <class Gradient, class Parameter, bool kL2, bool kNearStart>
void update_adam(const AdamStep& step, const UpdateArrays& arrays, std::size_t numel) {
    const AdamStep s = step;  // a copy, which no store of the loop can change
    const float keep = 1.0f - s.one_minus_beta1;
    float* __restrict master = arrays.arrays[AdamStep::kMaster];
    float* __restrict exp_avg = arrays.arrays[AdamStep::kExpAvg];
    float* __restrict exp_avg_sq = arrays.arrays[AdamStep::kExpAvgSq];
    const auto* __restrict gradient = static_cast<const typename Gradient::Storage*>(arrays.gradient);
    auto* __restrict parameter = static_cast<typename Parameter::Storage*>(arrays.parameter);
    for (std::size_t i = 0; i < numel; ++i) {
        float p = master[i];
        float g = Gradient::widen(gradient[i]) * s.gradient_scale;
        if constexpr (kL2) g = g + s.l2 * p;
        const float gap = g - exp_avg[i];
        const float m = kNearStart ? exp_avg[i] + s.one_minus_beta1 * gap : g - gap * keep;
        const float v = exp_avg_sq[i] * s.beta2 + (s.one_minus_beta2 * g) * g;
        p = p * s.decay;
        p = p - s.step_size * (m / (__builtin_sqrtf(v) * s.inverse_sqrt_bias_correction2 + s.eps));
        exp_avg[i] = m;
        exp_avg_sq[i] = v;
        master[i] = p;
        if constexpr (IsWritten<Parameter>::value) parameter[i] = Parameter::narrow(p);
    }
}

template <class Gradient, class Parameter>
void update(const AdamStep& step, const UpdateArrays& arrays, std::size_t numel) {
    const bool near_start = step.one_minus_beta1 < 0.5f;
    if (step.l2 != 0.0f) {
        (near_start ? update_adam<Gradient, Parameter, true, true>
                    : update_adam<Gradient, Parameter, true, false>)(step, arrays, numel);
    } else {
        (near_start ? update_adam<Gradient, Parameter, false, true>
                    : update_adam<Gradient, Parameter, false, false>)(step, arrays, numel);
    }
}

// torch.optim.Adagrad, single-tensor order.
template <class Gradient, class Parameter>
void update(const AdagradStep& step, const UpdateArrays& arrays, std::size_t numel) {
    const AdagradStep s = step;
    const bool decays = s.weight_decay != 0.0f;
    float* __restrict master = arrays.arrays[AdagradStep::kMaster];
    float* __restrict sum = arrays.arrays[AdagradStep::kSum];
    const auto* __restrict gradient = static_cast<const typename Gradient::Storage*>(arrays.gradient);
    auto* __restrict parameter = static_cast<typename Parameter::Storage*>(arrays.parameter);
    for (std::size_t i = 0; i < numel; ++i) {
        float p = master[i];
        const float scaled = Gradient::widen(gradient[i]) * s.gradient_scale;
        const float g = decays ? scaled + s.weight_decay * p : scaled;
        const float total = sum[i] + g * g;
        p = p - s.step_size * (g / (__builtin_sqrtf(total) + s.eps));
        sum[i] = total;
        master[i] = p;
        if constexpr (IsWritten<Parameter>::value) parameter[i] = Parameter::narrow(p);
    }
}

// torch.optim.SGD, single-tensor order. A term with a coefficient of zero is omitted, so that an infinity in it cannot
// become NaN.
template <class Gradient, class Parameter>
void update(const SgdStep& step, const UpdateArrays& arrays, std::size_t numel) {
    const SgdStep s = step;
    const bool decays = s.weight_decay != 0.0f;
    const bool keeps = s.buffer_coefficient != 0.0f;
    const bool nesterov = s.nesterov_momentum != 0.0f;
    float* __restrict master = arrays.arrays[SgdStep::kMaster];
    float* __restrict momentum_buffer = arrays.arrays[SgdStep::kMomentumBuffer];
    const auto* __restrict gradient = static_cast<const typename Gradient::Storage*>(arrays.gradient);
    auto* __restrict parameter = static_cast<typename Parameter::Storage*>(arrays.parameter);
    for (std::size_t i = 0; i < numel; ++i) {
        float p = master[i];
        const float scaled = Gradient::widen(gradient[i]) * s.gradient_scale;
        const float g = decays ? scaled + s.weight_decay * p : scaled;
        const float kept = keeps ? s.buffer_coefficient * momentum_buffer[i] : 0.0f;
        const float buffer = kept + s.gradient_coefficient * g;
        const float direction = nesterov ? g + s.nesterov_momentum * buffer : buffer;
        p = p - s.lr * direction;
        momentum_buffer[i] = buffer;
        master[i] = p;
        if constexpr (IsWritten<Parameter>::value) parameter[i] = Parameter::narrow(p);
    }
}

// torch.optim.RMSprop, single-tensor order. The arrays for momentum and centering stay unchanged if these are off.
template <class Gradient, class Parameter>
void update(const RmspropStep& step, const UpdateArrays& arrays, std::size_t numel) {
    const RmspropStep s = step;
    const float keep = 1.0f - s.one_minus_alpha;
    const bool near_start = s.one_minus_alpha < 0.5f;
    const bool decays = s.weight_decay != 0.0f;
    const bool centered = s.centered != 0.0f;
    const bool moves = s.momentum != 0.0f;
    float* __restrict master = arrays.arrays[RmspropStep::kMaster];
    float* __restrict square_avg = arrays.arrays[RmspropStep::kSquareAvg];
    float* __restrict momentum_buffer = arrays.arrays[RmspropStep::kMomentumBuffer];
    float* __restrict grad_avg = arrays.arrays[RmspropStep::kGradAvg];
    const auto* __restrict gradient = static_cast<const typename Gradient::Storage*>(arrays.gradient);
    auto* __restrict parameter = static_cast<typename Parameter::Storage*>(arrays.parameter);
    // Six arrays need more checks for overlap than the compiler adds by itself.
#pragma GCC ivdep
    for (std::size_t i = 0; i < numel; ++i) {
        float p = master[i];
        const float scaled = Gradient::widen(gradient[i]) * s.gradient_scale;
        const float g = decays ? scaled + s.weight_decay * p : scaled;
        const float v = square_avg[i] * s.alpha + (s.one_minus_alpha * g) * g;
        const float gap = g - grad_avg[i];
        const float average = near_start ? grad_avg[i] + s.one_minus_alpha * gap : g - gap * keep;
        const float a = centered ? average : grad_avg[i];
        const float variance = centered ? v - a * a : v;
        const float change = g / (__builtin_sqrtf(variance) + s.eps);
        const float moved = moves ? s.momentum * momentum_buffer[i] + change : change;
        p = p - s.lr * moved;
        square_avg[i] = v;
        momentum_buffer[i] = moves ? moved : momentum_buffer[i];
        grad_avg[i] = a;
        master[i] = p;
        if constexpr (IsWritten<Parameter>::value) parameter[i] = Parameter::narrow(p);
    }
}

template <class Type>
void widen(const void* values, float* out, std::size_t numel) {
    const auto* __restrict in = static_cast<const typename Type::Storage*>(values);
    float* __restrict result = out;
    for (std::size_t i = 0; i < numel; ++i) result[i] = Type::widen(in[i]);
}

template <class Type>
void narrow(const float* values, void* out, std::size_t numel) {
    const float* __restrict in = values;
    auto* __restrict result = static_cast<typename Type::Storage*>(out);
    for (std::size_t i = 0; i < numel; ++i) result[i] = Type::narrow(in[i]);
}

// Adds squares to running sums. The order depends neither on the register width nor on the number of elements per call.
// The square of a float is exact in double and the sum cannot overflow, so the result is finite if and only if every
// element is. The number of elements must be a multiple of kSquareLanes in every call but the last.
template <class Type>
void add_squares(const typename Type::Storage* values, std::size_t numel, SquareSums& sums) {
    const auto* __restrict in = values;
    double lanes[kSquareLanes];
    for (std::size_t lane = 0; lane < kSquareLanes; ++lane) lanes[lane] = sums.lanes[lane];
    std::size_t i = 0;
    for (; i + kSquareLanes <= numel; i += kSquareLanes) {
        for (std::size_t lane = 0; lane < kSquareLanes; ++lane) {
            const double x = Type::widen(in[i + lane]);
            lanes[lane] = lanes[lane] + x * x;
        }
    }
    for (std::size_t lane = 0; i + lane < numel; ++lane) {
        const double x = Type::widen(in[i + lane]);
        lanes[lane] = lanes[lane] + x * x;
    }
    for (std::size_t lane = 0; lane < kSquareLanes; ++lane) sums.lanes[lane] = lanes[lane];
}

// Adds the running sums in a fixed tree.
inline double total_of(SquareSums sums) {
    for (std::size_t half = kSquareLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) sums.lanes[lane] = sums.lanes[lane] + sums.lanes[lane + half];
    }
    return sums.lanes[0];
}

template <class Type>
double sum_of_squares(const void* values, std::size_t numel, SquareSums* sums) {
    add_squares<Type>(static_cast<const typename Type::Storage*>(values), numel, *sums);
    return total_of(*sums);
}

template <class Gradient, class Sum>
void write_gradient(const typename Gradient::Storage* gradient, typename Sum::Storage* sum, std::size_t numel) {
    const auto* __restrict in = gradient;
    auto* __restrict out = sum;
    for (std::size_t i = 0; i < numel; ++i) {
        if constexpr (std::is_same_v<Gradient, Sum>) {
            out[i] = in[i];
        } else {
            out[i] = Sum::narrow(Gradient::widen(in[i]));
        }
    }
}

template <class Gradient, class Sum>
void add_gradient(const typename Gradient::Storage* gradient, typename Sum::Storage* sum, std::size_t numel) {
    const auto* __restrict in = gradient;
    auto* __restrict out = sum;
    for (std::size_t i = 0; i < numel; ++i) out[i] = Sum::narrow(Sum::widen(out[i]) + Gradient::widen(in[i]));
}

// Makes one pass over memory: each part of the sum is squared while it is in the first-level cache.
template <class Gradient, class Sum>
double accumulate(const void* gradient, void* sum, std::size_t numel, bool adds, SquareSums* sums) {
    constexpr std::size_t kPart = 1024;
    const auto* in = static_cast<const typename Gradient::Storage*>(gradient);
    auto* out = static_cast<typename Sum::Storage*>(sum);
    for (std::size_t begin = 0; begin < numel; begin += kPart) {
        const std::size_t part = numel - begin < kPart ? numel - begin : kPart;
        if (adds) {
            add_gradient<Gradient, Sum>(in + begin, out + begin, part);
        } else {
            write_gradient<Gradient, Sum>(in + begin, out + begin, part);
        }
        if (sums != nullptr) add_squares<Sum>(out + begin, part, *sums);
    }
    return sums == nullptr ? 0 : total_of(*sums);
}

// ---- state formats

// Returns thirty-two random bits for an element. They are a hash, so they depend on neither threads nor tasklets.
inline Bits random_bits(const CellPart& cell, std::size_t index) {
    Bits x = cell.key + (cell.first + static_cast<Bits>(index));
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// Rounds to one of the two neighbours in bf16; the nearer one is more probable. `random` has 16 bits.
inline std::uint16_t round_to_bf16(float value, Bits random) {
    const Bits bits = bits_of(value);
    const bool finite = (bits & 0x7fffffffu) < 0x7f800000u;
    return static_cast<std::uint16_t>(finite ? (bits + random) >> 16 : Bits{BFloat16::narrow(value)});
}

void round_bf16(const float* exp_avg, const float* exp_avg_sq, std::uint16_t* exp_avg_out,
                std::uint16_t* exp_avg_sq_out, const CellPart& cell) {
    const CellPart part = cell;
    const float* __restrict m = exp_avg;
    const float* __restrict v = exp_avg_sq;
    std::uint16_t* __restrict m_out = exp_avg_out;
    std::uint16_t* __restrict v_out = exp_avg_sq_out;
    for (std::size_t i = 0; i < part.numel; ++i) {
        const Bits random = random_bits(part, i);
        m_out[i] = round_to_bf16(m[i], random & 0xffffu);
        v_out[i] = round_to_bf16(v[i], random >> 16);
    }
}

// A floating-point code with kExponents exponents and three mantissa bits, relative to its block's exponent. The
// largest finite code means 1.75 * 2**(exponent - 127), the next one NaN (infinity becomes NaN, too), and codes below 8
// are subnormal. The exponent is biased as in fp32, and large enough that every code is a normal fp32 number.
template <Bits kExponents>
struct Minifloat {
    static constexpr Bits kMantissa = 20;  // bits of fp32 below a code
    static constexpr Bits kNan = kExponents * 8 - 1;
    static constexpr Bits kLargest = kNan - 1;
    static constexpr Bits kSmallestExponent = kExponents + 2;
    static constexpr Bits kLargestExponent = 254;

    // Returns the difference between a normal code and the upper 12 bits of its fp32 value.
    static Bits bias(Bits exponent) { return (exponent - (kExponents - 1)) * 8; }
    // Returns the fp32 bits of code 8, the smallest normal one.
    static Bits least_normal(Bits exponent) { return (exponent - (kExponents - 2)) << 23; }

    // Returns the exponent of a block with the given largest finite magnitude: the smallest one that does not round it
    // down to kLargest.
    static Bits exponent_for(Bits magnitude) {
        const Bits fitting = (magnitude + 0x1fffffu) >> 23;
        const Bits floored = fitting < kSmallestExponent ? kSmallestExponent : fitting;
        return floored > kLargestExponent ? kLargestExponent : floored;
    }

    static Bits decode(Bits code, Bits exponent) {
        const bool subnormal = code < 8;
        const Bits shifted = (code + bias(exponent) + (subnormal ? 8u : 0u)) << kMantissa;
        const float offset = subnormal ? float_of(least_normal(exponent)) : 0.0f;
        return code == kNan ? 0x7fc00000u : bits_of(float_of(shifted) - offset);
    }

    // Returns the unrounded code, in units of 2**-20. A subnormal is computed at code 8's exponent, which has its ulp.
    static Bits scaled(Bits magnitude, Bits exponent) {
        const bool subnormal = magnitude < least_normal(exponent);
        const Bits shifted = bits_of(float_of(magnitude) + float_of(least_normal(exponent)));
        return (subnormal ? shifted - (8u << kMantissa) : magnitude) - (bias(exponent) << kMantissa);
    }

    static Bits clamped(Bits code, Bits magnitude) {
        const Bits finite = code > kLargest ? kLargest : code;
        return magnitude >= 0x7f800000u ? kNan : finite;
    }

    static Bits nearest(Bits magnitude, Bits exponent) {
        const Bits exact = scaled(magnitude, exponent);
        return clamped((exact + 0x7ffffu + ((exact >> kMantissa) & 1u)) >> kMantissa, magnitude);
    }

    // `random` has 16 bits, which are centred in the 20 bits below a code.
    static Bits stochastic(Bits magnitude, Bits exponent, Bits random) {
        return clamped((scaled(magnitude, exponent) + (random * 16u + 8u)) >> kMantissa, magnitude);
    }
};

struct ExpAvgCode : Minifloat<16> {
    static Bits sign_of(Bits bits) { return (bits >> 24) & 0x80u; }
    static Bits with_sign(Bits code, Bits bits, Bits) { return code | sign_of(bits); }
    static float widen(Bits code, Bits exponent) {
        return float_of(decode(code & 0x7fu, exponent) | (code & 0x80u) << 24);
    }
};

struct ExpAvgSqCode : Minifloat<32> {
    // Returns code 0 only for zero and fp32 subnormals: with a second moment of zero the update would explode.
    static Bits with_sign(Bits code, Bits, Bits magnitude) {
        return code == 0u && magnitude >= 0x00800000u ? 1u : code;
    }
    static float widen(Bits code, Bits exponent) { return float_of(decode(code, exponent)); }
};

inline Bits magnitude_of(float value) { return bits_of(value) & 0x7fffffffu; }

// Uses a mask, because a condition would keep loops over this function from being vectorised.
inline Bits finite_magnitude_of(float value) {
    const Bits magnitude = magnitude_of(value);
    return magnitude & (0u - Bits{magnitude < 0x7f800000u});
}

inline Bits larger(Bits left, Bits right) { return left > right ? left : right; }

template <class Code>
void encode(const float* values, const Codes& out, std::size_t numel) {
    const float* __restrict in = values;
    std::uint8_t* __restrict codes = out.codes;
    Bits largest = 0;
    for (std::size_t i = 0; i < numel; ++i) largest = larger(largest, finite_magnitude_of(in[i]));
    const Bits exponent = Code::exponent_for(largest);
    for (std::size_t i = 0; i < numel; ++i) {
        const Bits magnitude = magnitude_of(in[i]);
        const Bits code = Code::nearest(magnitude, exponent);
        codes[i] = static_cast<std::uint8_t>(Code::with_sign(code, bits_of(in[i]), magnitude));
    }
    *out.exponent = static_cast<std::uint8_t>(exponent);
}

template <class Code>
void decode(const Codes& from, float* out, std::size_t numel) {
    const std::uint8_t* __restrict codes = from.codes;
    float* __restrict result = out;
    const Bits exponent = *from.exponent;
    for (std::size_t i = 0; i < numel; ++i) result[i] = Code::widen(codes[i], exponent);
}

template <class Code>
inline std::uint8_t round_to(float value, Bits exponent, Bits random) {
    const Bits magnitude = magnitude_of(value);
    const Bits code = Code::stochastic(magnitude, exponent, random);
    return static_cast<std::uint8_t>(Code::with_sign(code, bits_of(value), magnitude));
}

void round_int8(const float* exp_avg, const float* exp_avg_sq, const Codes& exp_avg_out, const Codes& exp_avg_sq_out,
                const CellPart& cell) {
    const CellPart part = cell;
    const float* __restrict m = exp_avg;
    const float* __restrict v = exp_avg_sq;
    std::uint8_t* __restrict m_out = exp_avg_out.codes;
    std::uint8_t* __restrict v_out = exp_avg_sq_out.codes;
    Bits largest_m = 0;
    Bits largest_v = 0;
    for (std::size_t i = 0; i < part.numel; ++i) {
        largest_m = larger(largest_m, finite_magnitude_of(m[i]));
        largest_v = larger(largest_v, finite_magnitude_of(v[i]));
    }
    const Bits exponent_m = ExpAvgCode::exponent_for(largest_m);
    const Bits exponent_v = ExpAvgSqCode::exponent_for(largest_v);
    for (std::size_t i = 0; i < part.numel; ++i) {
        const Bits random = random_bits(part, i);
        m_out[i] = round_to<ExpAvgCode>(m[i], exponent_m, random & 0xffffu);
        v_out[i] = round_to<ExpAvgSqCode>(v[i], exponent_v, random >> 16);
    }
    *exp_avg_out.exponent = static_cast<std::uint8_t>(exponent_m);
    *exp_avg_sq_out.exponent = static_cast<std::uint8_t>(exponent_v);
}

// Splits into the nearest bf16, ties to even as everywhere, and a remainder. One value in 2**17 is half-way above an
// even bf16, where the remainder would be 2**15. It gets its neighbour's, 2**15 - 1, so that 16 bits suffice.
void split(const float* values, std::uint16_t* parameter, std::uint16_t* remainder, std::size_t numel) {
    const float* __restrict in = values;
    std::uint16_t* __restrict high = parameter;
    std::uint16_t* __restrict low = remainder;
    for (std::size_t i = 0; i < numel; ++i) {
        const Bits bits = bits_of(in[i]);
        const Bits nearest = BFloat16::narrow(in[i]);
        const Bits rest = bits - (nearest << 16);
        const Bits fitting = rest == 0x8000u ? 0x7fffu : rest;
        high[i] = static_cast<std::uint16_t>(nearest);
        low[i] = static_cast<std::uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? 0u : fitting);
    }
}

void join(const std::uint16_t* parameter, const std::uint16_t* remainder, float* out, std::size_t numel) {
    const std::uint16_t* __restrict high = parameter;
    const std::uint16_t* __restrict low = remainder;
    float* __restrict result = out;
    for (std::size_t i = 0; i < numel; ++i) {
        const Bits signed_low = (Bits{low[i]} ^ 0x8000u) - 0x8000u;
        result[i] = float_of((Bits{high[i]} << 16) + signed_low);
    }
}

// ---- compressed gradients

#include "kernels/kernels_gradients.inl"

// ---- the table

#define SMART_INFINITY_UPDATE_ROW(Gradient) \
    {update<Gradient, Float32>, update<Gradient, Float16>, update<Gradient, BFloat16>, update<Gradient, NotWritten>}

// Holds the overload of `update` for each rule's step, in the order of DType.
template <class... Steps>
struct UpdateTable {
    static constexpr UpdatesOf<Steps...> kTable{
        Updates<Steps>{{SMART_INFINITY_UPDATE_ROW(Float32), SMART_INFINITY_UPDATE_ROW(Float16),
                        SMART_INFINITY_UPDATE_ROW(BFloat16)}}...};
};

#undef SMART_INFINITY_UPDATE_ROW

}  // namespace

#define SMART_INFINITY_ACCUMULATE_ROW(Gradient) \
    {accumulate<Gradient, Float32>, accumulate<Gradient, Float16>, accumulate<Gradient, BFloat16>}

// All rows are in the order of DType.
const Kernels SMART_INFINITY_KERNELS = {
    OfSteps<UpdateTable>::kTable,
    {widen<Float32>, widen<Float16>, widen<BFloat16>},
    {narrow<Float32>, narrow<Float16>, narrow<BFloat16>},
    {sum_of_squares<Float32>, sum_of_squares<Float16>, sum_of_squares<BFloat16>},
    {SMART_INFINITY_ACCUMULATE_ROW(Float32), SMART_INFINITY_ACCUMULATE_ROW(Float16),
     SMART_INFINITY_ACCUMULATE_ROW(BFloat16)},
    round_bf16,
    round_int8,
    encode<ExpAvgCode>,
    encode<ExpAvgSqCode>,
    decode<ExpAvgCode>,
    decode<ExpAvgSqCode>,
    split,
    join,
    {add_residual<Float32>, add_residual<Float16>, add_residual<BFloat16>},
    {feed_residual<Float32>, feed_residual<Float16>, feed_residual<BFloat16>},
    collect,
    encode_gradient,
    decode_gradient,
};

#undef SMART_INFINITY_ACCUMULATE_ROW

}  // namespace smart_infinity
