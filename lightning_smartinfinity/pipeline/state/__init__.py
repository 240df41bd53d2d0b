"""The state between storage and the kernels: reads, writes, windows and conversion."""
