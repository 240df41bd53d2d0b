// Updates one element as torch.optim.Adagrad does.
#pragma once

#include <hls_math.h>

#include <card_kernels.hpp>

namespace card {

struct AdagradUpdate {
    AdagradScalars step;

    void operator()(float gradient, float& p, float& sum) const {
#pragma HLS INLINE
        float g = gradient * step.gradient_scale;
        g = step.weight_decay != 0.0f ? g + step.weight_decay * p : g;
        sum = sum + g * g;
        p = p - step.step_size * (g / (hls::sqrt(sum) + step.eps));
    }
};

}  // namespace card
