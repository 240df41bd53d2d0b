"""Divides parameters into tasklets, storage folders and batches, and describes the memory of batches."""
