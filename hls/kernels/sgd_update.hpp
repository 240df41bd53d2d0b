// Updates one element as torch.optim.SGD does.
#pragma once

#include <card_kernels.hpp>

namespace card {

struct SgdUpdate {
    SgdScalars step;

    void operator()(float gradient, float& p, float& buffer) const {
#pragma HLS INLINE
        float g = gradient * step.gradient_scale;
        g = step.weight_decay != 0.0f ? g + step.weight_decay * p : g;
        const float kept = step.buffer_coefficient != 0.0f ? step.buffer_coefficient * buffer : 0.0f;
        buffer = kept + step.gradient_coefficient * g;
        const float change = step.nesterov_momentum != 0.0f ? g + step.nesterov_momentum * buffer : buffer;
        p = p - step.lr * change;
    }
};

}  // namespace card
