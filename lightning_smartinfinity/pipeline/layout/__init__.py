"""How parameters are divided into tasklets, devices and batches, and the memory of batches."""
