"""A fit that is resumed goes on as the uninterrupted one did: its loops, its batches and its random numbers."""
