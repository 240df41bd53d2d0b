"""The stage-3 optimizer whose state is on storage: a gradient's way, the step, and writes from outside a step."""
