"""Reads, checks and converts the files of a checkpoint: ours, DeepSpeed's, and universal folders."""
