// The compute units of the emulated card: the card's kernels, compiled for this machine.
#include <card_kernels.hpp>

#include "dispatch.hpp"

#define COMPUTE_UNIT(function, number) SMART_INFINITY_COMPUTE_UNIT(function);
CARD_KERNELS(COMPUTE_UNIT)
