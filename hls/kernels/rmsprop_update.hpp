// Updates one element as torch.optim.RMSprop does.
//
// Without momentum, or not centered, an array that torch does not have stays as it is.
#pragma once

#include <hls_math.h>

#include <card_kernels.hpp>

namespace card {

struct RmspropUpdate {
    RmspropScalars step;
    float keep = 1.0f - step.one_minus_alpha;  // one subtractor, not one for every lane

    void operator()(float gradient, float& p, float& v, float& buffer, float& average) const {
#pragma HLS INLINE
        float g = gradient * step.gradient_scale;
        g = step.weight_decay != 0.0f ? g + step.weight_decay * p : g;
        v = v * step.alpha + (step.one_minus_alpha * g) * g;
        if (step.centered != 0.0f) average = lerp(average, g);
        const float variance = step.centered != 0.0f ? v - average * average : v;
        float change = g / (hls::sqrt(variance) + step.eps);
        if (step.momentum != 0.0f) change = buffer = step.momentum * buffer + change;
        p = p - step.lr * change;
    }

    // Returns torch.lerp(average, g, 1 - alpha), whose formula has two branches.
    float lerp(float average, float g) const {
#pragma HLS INLINE
        const float gap = g - average;
        return step.one_minus_alpha < 0.5f ? average + step.one_minus_alpha * gap : g - gap * keep;
    }
};

}  // namespace card
