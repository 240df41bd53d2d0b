"""Moves optimizer state between storage and memory: reads, writes, windows and conversion."""
