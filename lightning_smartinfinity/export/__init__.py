"""Exports weights for transformers and for plain Lightning, from checkpoints and from trainings."""
