"""The stage-3 optimizer with its state on storage: the gradient path, the step, and writes made outside a step."""
