// The compute units of the emulated card: the kernels as they are built for the card, compiled for this machine.
#include <kernels.hpp>

#include "dispatch.hpp"

SMART_INFINITY_COMPUTE_UNIT(adamw_update);
SMART_INFINITY_COMPUTE_UNIT(adagrad_update);
SMART_INFINITY_COMPUTE_UNIT(sgd_update);
