// The kernels, once: compiled by kernels_scalar.cpp, kernels_avx2.cpp and kernels_avx512.cpp with the same
// floating-point rules (-ffp-contract=off, no -ffast-math), which makes them bit-equal. Loops are written for the
// auto-vectoriser.
//
// Everything sits in an anonymous namespace and calls no library function, so that no symbol compiled for a newer
// instruction set can replace one of another translation unit.
//
// The conversions must hold under FTZ + DAZ: they use integer logic, and floating point only where no operand or result
// that matters is an fp32 subnormal.

#ifndef SMART_INFINITY_KERNELS
#error "define SMART_INFINITY_KERNELS, the name of the table, before including kernels.inl"
#endif

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
        // 0.5 has an ulp of 2**-24, the unit of fp16 subnormals: the addition rounds to nearest even for us, and an
        // fp32 subnormal that DAZ reads as zero rounds to zero anyway.
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
void update(const AdamStep& step, const AdamArrays& arrays, std::size_t numel) {
    const AdamStep s = step;  // by value: nothing the loop stores can change it
    const float keep = 1.0f - s.one_minus_beta1;
    float* __restrict master = arrays.master;
    float* __restrict exp_avg = arrays.exp_avg;
    float* __restrict exp_avg_sq = arrays.exp_avg_sq;
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
void adam(const AdamStep& step, const AdamArrays& arrays, std::size_t numel) {
    const bool near_start = step.one_minus_beta1 < 0.5f;
    if (step.l2 != 0.0f) {
        (near_start ? update<Gradient, Parameter, true, true> : update<Gradient, Parameter, true, false>)(step, arrays,
                                                                                                          numel);
    } else {
        (near_start ? update<Gradient, Parameter, false, true>
                    : update<Gradient, Parameter, false, false>)(step, arrays, numel);
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

// Thirty-two running sums, then a fixed tree: the order does not depend on the width of the registers. The square of a
// float is exact in double and their sum cannot overflow, so that the result is finite iff every element is.
template <class Type>
double sum_of_squares(const void* values, std::size_t numel) {
    constexpr std::size_t kLanes = 32;
    const auto* __restrict in = static_cast<const typename Type::Storage*>(values);
    double sums[kLanes] = {};
    std::size_t i = 0;
    for (; i + kLanes <= numel; i += kLanes) {
        for (std::size_t lane = 0; lane < kLanes; ++lane) {
            const double x = Type::widen(in[i + lane]);
            sums[lane] = sums[lane] + x * x;
        }
    }
    for (std::size_t lane = 0; i + lane < numel; ++lane) {
        const double x = Type::widen(in[i + lane]);
        sums[lane] = sums[lane] + x * x;
    }
    for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::size_t lane = 0; lane < half; ++lane) sums[lane] = sums[lane] + sums[lane + half];
    }
    return sums[0];
}

}  // namespace

#define SMART_INFINITY_ADAM_ROW(Gradient) \
    {adam<Gradient, Float32>, adam<Gradient, Float16>, adam<Gradient, BFloat16>, adam<Gradient, NotWritten>}

// The order is that of DType.
const Kernels SMART_INFINITY_KERNELS = {
    {SMART_INFINITY_ADAM_ROW(Float32), SMART_INFINITY_ADAM_ROW(Float16), SMART_INFINITY_ADAM_ROW(BFloat16)},
    {widen<Float32>, widen<Float16>, widen<BFloat16>},
    {narrow<Float32>, narrow<Float16>, narrow<BFloat16>},
    {sum_of_squares<Float32>, sum_of_squares<Float16>, sum_of_squares<BFloat16>},
};

#undef SMART_INFINITY_ADAM_ROW

}  // namespace smart_infinity
