"""Copies between CUDA devices and the pool of host memory, and how the host keeps pace with them."""
