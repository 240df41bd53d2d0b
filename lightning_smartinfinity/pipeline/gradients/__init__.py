"""Gradients on their way to the update: the arena, memory within a budget, and compression."""
