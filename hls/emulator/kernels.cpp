// The compute units of the emulated card: the card's kernels, compiled for this machine.
#include <kernels.hpp>

#include "dispatch.hpp"

SMART_INFINITY_COMPUTE_UNIT(adamw_update);
SMART_INFINITY_COMPUTE_UNIT(adagrad_update);
SMART_INFINITY_COMPUTE_UNIT(sgd_update);
