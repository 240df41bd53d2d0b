"""Offloads activations: tensors that forward saves are written to storage, and read back before backward uses them.

This package is below ``zero3`` and above ``pipeline``. It shares the storage devices with the optimizer state.
"""

from lightning_smartinfinity.activations.offloading import OffloadedActivations, paused
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.activations.tuning.tuner import FIRST_SETTLED_FORWARD

__all__ = ["FIRST_SETTLED_FORWARD", "ActivationTraffic", "OffloadedActivations", "paused"]
