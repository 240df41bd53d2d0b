"""The scalars of a step, whatever the update rule."""

from __future__ import annotations

from typing import TypeAlias

from lightning_smartinfinity.native import AdagradStep, AdamStep, SgdStep

__all__ = ["UpdateStep"]

UpdateStep: TypeAlias = AdamStep | AdagradStep | SgdStep
"""Those of one hyperparameter set at one step."""
