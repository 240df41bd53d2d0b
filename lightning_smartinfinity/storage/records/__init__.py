"""The record of a training and the residual of compressed gradients, which a step writes beside the state."""
