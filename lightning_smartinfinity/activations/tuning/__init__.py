"""Decides, from measured steps, which tensors of which forwards are offloaded."""
