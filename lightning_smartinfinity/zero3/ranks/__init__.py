"""Several ranks: collectives, shared file systems, work in the background, and the watch for lost ranks."""
