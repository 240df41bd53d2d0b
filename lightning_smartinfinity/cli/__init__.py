"""The ``smart-infinity`` command, which may use every other module."""

from __future__ import annotations

from lightning_smartinfinity.cli.main import main

__all__ = ["main"]
