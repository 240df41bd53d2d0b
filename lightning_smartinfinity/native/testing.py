"""Faults to order, for the tests of everything that sits on the native core."""

from __future__ import annotations

from lightning_smartinfinity.native._core import inject

__all__ = ["inject"]
