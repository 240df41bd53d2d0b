"""Kernels of the SmartSSD's accelerator, their build for the card, and their emulation without one."""
