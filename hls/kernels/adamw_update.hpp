// Updates one element as torch.optim.Adam and AdamW do.
#pragma once

#include <hls_math.h>

#include <card_kernels.hpp>

namespace card {

struct AdamwUpdate {
    AdamwScalars step;
    float keep = 1.0f - step.one_minus_beta1;  // one subtractor, not one for every lane

    void operator()(float gradient, float& p, float& m, float& v) const {
#pragma HLS INLINE
        float g = gradient * step.gradient_scale;
        g = step.l2 != 0.0f ? g + step.l2 * p : g;
        // torch.lerp(m, g, 1 - beta1), whose formula has two branches
        const float gap = g - m;
        m = step.one_minus_beta1 < 0.5f ? m + step.one_minus_beta1 * gap : g - gap * keep;
        v = v * step.beta2 + (step.one_minus_beta2 * g) * g;
        p = p * step.decay;
        p = p - step.step_size * (m / (hls::sqrt(v) * step.inverse_sqrt_bias_correction2 + step.eps));
    }
};

}  // namespace card
