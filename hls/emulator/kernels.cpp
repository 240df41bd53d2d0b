// The compute units of the emulated card: the kernels as they are built for the card, compiled for this machine.
#include <card_kernels.hpp>

#include "dispatch.hpp"

#define COMPUTE_UNIT(function, number, arrays) SMART_INFINITY_COMPUTE_UNIT(function);
CARD_KERNELS(COMPUTE_UNIT)
