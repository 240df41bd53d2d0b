"""Several ranks: collectives, shared file systems, background jobs, and the watch for lost ranks."""
