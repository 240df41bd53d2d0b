"""Faults to order, for the tests of everything that sits on the native core."""

from __future__ import annotations

from lightning_smartinfinity.native._core import Hold, Throttle, inject, use_cuda_library

__all__ = ["Hold", "Throttle", "inject", "use_cuda_library"]
