"""Tensors on storage: parameters, gradients and activations."""
