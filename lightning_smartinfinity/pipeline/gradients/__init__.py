"""Gradients before the update: the arena, memory within a budget, and compression."""
