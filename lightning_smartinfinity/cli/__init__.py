"""The ``smart-infinity`` command, on top of everything else."""

from __future__ import annotations

from lightning_smartinfinity.cli.main import main

__all__ = ["main"]
