"""Saving and loading checkpoints: DeepSpeed's ZeRO-3 format, universal checkpoints and whole weights."""
