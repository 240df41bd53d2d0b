"""Offloads activations: what forward saves for backward is written to storage, and read back before it is needed.

The package sits below ``zero3``, above ``transfer``, and shares the storage devices with the optimizer state.
"""

from lightning_smartinfinity.activations.offloading import OffloadedActivations, paused
from lightning_smartinfinity.activations.traffic import ActivationTraffic
from lightning_smartinfinity.activations.tuning.learning import FIRST_SETTLED_FORWARD

__all__ = ["FIRST_SETTLED_FORWARD", "ActivationTraffic", "OffloadedActivations", "paused"]
