"""Loads a checkpoint into an engine: checks, weights, and optimizer state for another number of ranks."""
