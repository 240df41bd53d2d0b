"""The state of the optimizer on storage: its place, creation, commits, recovery and scrub."""
