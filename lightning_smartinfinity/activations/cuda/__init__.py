"""Copies between CUDA devices and the pool of host memory, and times on devices."""
