"""Moves updated parameters to the tensors with which the model computes."""
