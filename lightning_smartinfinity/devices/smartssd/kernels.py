"""The kernels of the xclbin, and the torch optimizers that they implement."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_smartinfinity import native
from lightning_smartinfinity.common.update_rules import RULES, RuleDescription, optimizer_names
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.native import UpdateStep

__all__ = ["KERNELS", "LARGEST_NUMEL", "Kernel", "kernel_of"]

LARGEST_NUMEL = 1 << 29
"""Number of elements of the largest tasklet that a kernel can update."""


@dataclass(frozen=True)
class Kernel:
    """One update rule on a card."""

    rule: RuleDescription

    @property
    def name(self) -> str:
        """Name of the kernel in the xclbin."""
        return self.rule.kernel

    @property
    def num_arrays(self) -> int:
        """Number of arrays per element on storage, including the master."""
        return len(self.rule.arrays)

    def example(self) -> UpdateStep:
        """Return the scalars of a step that exercises the whole arithmetic, for self-tests."""
        step: UpdateStep = getattr(native, self.rule.step)(**self.rule.scalars)
        return step


KERNELS = tuple(map(Kernel, RULES))


def kernel_of(optimizer: str) -> Kernel:
    """Find the kernel of a torch optimizer by its class name (``UpdateRule.name``).

    Raises:
        UnsupportedError: No kernel updates with this optimizer.
    """
    for kernel in KERNELS:
        if optimizer in kernel.rule.optimizers:
            return kernel
    raise UnsupportedError(
        f"No SmartSSD kernel updates torch.optim.{optimizer}.",
        f"Use update_device='host'; SmartSSDs update {optimizer_names()}.",
    )
