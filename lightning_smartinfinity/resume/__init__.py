"""Resumes a training as if it had never stopped: loops, batches, random numbers and the record on storage."""
