"""Updated parameters on their way back to the tensors that the model computes with."""
