"""DeepSpeed's engines with the optimizer on storage, and how they are built."""
