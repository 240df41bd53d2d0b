"""The ``smart-infinity`` command. It may import every other room."""

from __future__ import annotations

from lightning_smartinfinity.cli.main import main

__all__ = ["main"]
