"""Reads, checks and converts checkpoint files: this package's, DeepSpeed's, and universal folders."""
