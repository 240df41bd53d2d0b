"""Helpers that every room may use: patches of other libraries, freed memory, progress bars, facts of the machine."""
