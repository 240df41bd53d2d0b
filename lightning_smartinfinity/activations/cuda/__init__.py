"""What tensors on a CUDA device need before and behind the pool of host memory."""
