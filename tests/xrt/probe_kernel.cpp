// A compute unit for tests of the emulated card itself: as simple as can be, without checks of its arguments.
#include <cstdint>

#include "dispatch.hpp"

namespace {

constexpr std::uint32_t kLanes = 16;

struct alignas(64) Beat {
    float lanes[kLanes];
};

// Beats [first, last): data += gradient; parameter = data * scale. The status beat is the product of two small numbers.
void probe(const Beat* gradient, const Beat* data_in, Beat* data_out, Beat* parameter, Beat* status, std::uint32_t,
           std::uint32_t first, std::uint32_t last, std::uint32_t, std::uint32_t, std::uint32_t, float scale) {
    for (std::uint32_t beat = first; beat != last; ++beat) {
        for (std::uint32_t lane = 0; lane < kLanes; ++lane) {
            const float sum = data_in[beat].lanes[lane] + gradient[beat].lanes[lane];
            data_out[beat].lanes[lane] = sum;
            parameter[beat].lanes[lane] = sum * scale;
        }
    }
    volatile float small = 1e-30f;
    for (float& lane : status->lanes) lane = small * 1e-10f;
}

}  // namespace

SMART_INFINITY_COMPUTE_UNIT(probe);
