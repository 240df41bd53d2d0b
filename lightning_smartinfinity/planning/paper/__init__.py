"""The published paper's tables, and simulations of the same numbers."""
