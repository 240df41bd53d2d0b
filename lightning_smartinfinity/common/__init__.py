"""Patches of other libraries, freed memory, progress bars and facts of the machine, which every room uses."""
