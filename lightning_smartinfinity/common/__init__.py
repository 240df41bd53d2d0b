"""What every room may use: patches of other libraries, freed memory, progress bars, and facts of the machine."""
