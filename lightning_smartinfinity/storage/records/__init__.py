"""The training record and the residual of compressed gradients, which are stored in addition to the state."""
