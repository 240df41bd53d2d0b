// Kernels of compressed gradients: a part of kernels.inl.

// Limits a sum to finite values: an infinity would leave NaN in the residual permanently.
inline float saturated(float sum) {
    constexpr float kLargest = 0x1.fffffep127f;
    const float above = sum < -kLargest ? -kLargest : sum;
    return above > kLargest ? kLargest : above;
}

// Computes the values to send: the gradient plus the residual, which earlier steps did not send. If the residual is
// zero, the gradient is copied, since -0 + 0 would change the sign of a zero.
template <class Gradient>
void add_residual(const void* gradient, const float* residual, float scale, float* out, std::size_t numel) {
    const auto* __restrict g = static_cast<const typename Gradient::Storage*>(gradient);
    const float* __restrict e = residual;
    float* __restrict y = out;
    for (std::size_t i = 0; i < numel; ++i) {
        const float value = Gradient::widen(g[i]);
        const float sum = saturated(value + e[i] * scale);
        y[i] = e[i] != 0.0f ? sum : value;
    }
}

template <class Gradient>
void feed_residual(const void* gradient, const float* sent, float scale, float* residual, std::size_t numel) {
    const auto* __restrict g = static_cast<const typename Gradient::Storage*>(gradient);
    const float* __restrict v = sent;
    float* __restrict e = residual;
    for (std::size_t i = 0; i < numel; ++i) {
        const float value = Gradient::widen(g[i]);
        const float sum = saturated(value + e[i] * scale);
        const float y = e[i] != 0.0f ? sum : value;
        e[i] = (y - v[i]) / scale;
    }
}

// Skips groups of values without a match, which are the majority.
std::size_t collect(const float* values, std::size_t numel, std::uint32_t least, std::uint32_t first,
                    std::uint32_t* elements, float* out) {
    constexpr std::size_t kGroup = 32;
    const float* __restrict in = values;
    std::uint32_t* __restrict where = elements;
    float* __restrict found = out;
    std::size_t count = 0;
    const auto add = [&](std::size_t i) {
        where[count] = first + static_cast<std::uint32_t>(i);
        found[count] = in[i];
        count += magnitude_of(in[i]) >= least;
    };
    std::size_t begin = 0;
    for (; begin + kGroup <= numel; begin += kGroup) {
        Bits largest = 0;
        for (std::size_t i = 0; i < kGroup; ++i) largest = larger(largest, magnitude_of(in[begin + i]));
        if (largest < least) continue;
        for (std::size_t i = 0; i < kGroup; ++i) add(begin + i);
    }
    for (; begin < numel; ++begin) add(begin);
    return count;
}

// A block's scale is a power of two. Its exponent is kScaleGap below the exponent of the largest magnitude, or one more
// if that magnitude would be rounded to 128.
constexpr Bits kScaleGap = 6;

inline Bits gradient_scale(Bits largest) {
    const Bits fitting = (largest + 0x10000u) >> 23;
    const Bits floored = fitting <= kScaleGap ? 1u : fitting - kScaleGap;
    return floored > kLargestScale ? kLargestScale : floored;
}

void encode_gradient(const float* values, std::size_t numel, std::int8_t* codes, std::uint8_t* exponent) {
    constexpr float kUnit = 12582912.0f;  // 1.5 * 2**23: adding it rounds to a whole number, ties to even
    const float* __restrict in = values;
    std::int8_t* __restrict out = codes;
    Bits largest = 0;
    for (std::size_t i = 0; i < numel; ++i) largest = larger(largest, finite_magnitude_of(in[i]));
    const Bits scale = gradient_scale(largest);
    const float inverse = float_of((254u - scale) << 23);
    for (std::size_t i = 0; i < numel; ++i) {
        const Bits magnitude = magnitude_of(in[i]);
        const float exact = float_of(magnitude) * inverse;
        const float fitting = exact < 127.0f ? exact : 127.0f;  // NaN becomes the largest, too
        const Bits sign = 0u - (bits_of(in[i]) >> 31);
        const Bits code = bits_of(fitting + kUnit) - bits_of(kUnit);
        out[i] = static_cast<std::int8_t>((code ^ sign) - sign);
    }
    *exponent = static_cast<std::uint8_t>(scale);
}

void decode_gradient(const std::int8_t* codes, std::uint8_t exponent, float* out, std::size_t numel) {
    const std::int8_t* __restrict in = codes;
    float* __restrict values = out;
    const float scale = float_of(Bits{exponent} << 23);
    for (std::size_t i = 0; i < numel; ++i) values[i] = static_cast<float>(in[i]) * scale;
}
