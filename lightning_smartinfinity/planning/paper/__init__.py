"""The published paper's tables, and the same numbers simulated."""
