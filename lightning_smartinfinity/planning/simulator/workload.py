"""The update work of one training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native import MAX_ARRAYS
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.planning.simulator.gradients import ITEM_BYTES, GradientForm
from lightning_smartinfinity.settings import CARD_TASKLET_BYTES, HOST_TASKLET_BYTES, NUM_BUFFERS
from lightning_smartinfinity.settings.rules import Rule, between, one_of, optional, require
from lightning_smartinfinity.storage.extents import BLOCK_BYTES

__all__ = ["ENOUGH_TASKLETS", "NUM_ARRAYS", "Workload"]

NUM_ARRAYS: Mapping[str, int] = MappingProxyType({rule.name: len(rule.arrays) for rule in RULES})
"""Number of fp32 arrays per element on storage, including the master, by the name of the update rule."""

_FP32_BYTES = 4
_MOST_PARAMETERS = 10**12
_LEAST_TASKLET_BYTES, _MOST_TASKLET_BYTES = 64 * 1024, 1 << 40
_FORM = Rule(
    "Pass Dense(...), TopKPayload(...), BlockScaledPayload() or Pairs(...)",
    lambda value: isinstance(value, GradientForm),
    "is no form of gradients",
)

ENOUGH_TASKLETS = 4096
"""Most tasklets to simulate: with this many, filling and emptying a ring takes far less than 1 % of a step."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The step of one process.

    Args:
        numel: Number of parameters.
        gradients: Form in which gradients are sent.
        num_arrays: Number of arrays of state; see :data:`NUM_ARRAYS`.
        parameter_bytes: Bytes per element of the parameters that the update returns: 2 or 4.
        state_format: Name in ``STATE_FORMATS``; accelerators support few of them.
        tasklet_bytes: Bytes of the largest extent; None means the device's default in ``TransferConfig``.
        num_buffers: Number of buffers of each ring.
    """

    numel: int
    gradients: GradientForm
    num_arrays: int = 3
    parameter_bytes: int = 2
    state_format: str = "fp32"
    tasklet_bytes: int | None = None
    num_buffers: int = 16

    def __post_init__(self) -> None:
        require(
            self,
            numel=between(1, _MOST_PARAMETERS),
            gradients=_FORM,
            num_arrays=between(1, MAX_ARRAYS),
            parameter_bytes=ITEM_BYTES,
            state_format=one_of(*STATE_FORMATS),
            tasklet_bytes=optional(between(_LEAST_TASKLET_BYTES, _MOST_TASKLET_BYTES)),
            num_buffers=NUM_BUFFERS,
        )
        form = STATE_FORMATS[self.state_format]
        if form.arrays and self.num_arrays != len(form.arrays):
            raise ConfigError(
                f"Workload(state_format={self.state_format!r}, num_arrays={self.num_arrays}) is no state of this"
                " package.",
                f"Pass num_arrays={len(form.arrays)}, or state_format={names_where(lambda other: not other.arrays)}.",
            )
        held_bytes = form.item_bytes(self.num_arrays)[0]
        if form.required_parameters is not None and self.parameter_bytes != held_bytes:
            raise ConfigError(
                f"Workload(state_format={self.state_format!r}, parameter_bytes={self.parameter_bytes}) does not exist:"
                f" the upper halves of the masters are parameters in {form.required_parameters}.",
                f"Use parameter_bytes={held_bytes}, or"
                f" state_format={names_where(lambda other: other.required_parameters is None)}.",
            )

    @property
    def array_bytes(self) -> int:
        """Bytes per element of all arrays in fp32."""
        return _FP32_BYTES * self.num_arrays

    @property
    def kernel_bytes(self) -> int:
        """Bytes per element that an update reads in fp32: the arrays and the gradient."""
        return self.array_bytes + _FP32_BYTES

    def card_layout(self, num_devices: int) -> PartitionLayout:
        """Return the layout of tasklets for accelerators."""
        return self._layout(num_devices, CARD_TASKLET_BYTES)

    def simulated_card_layout(self, num_devices: int) -> PartitionLayout:
        """Return the layout for accelerators, with larger tasklets in large models, so that fewer are simulated."""
        return self._layout(num_devices, max(CARD_TASKLET_BYTES, self._enough_bytes(num_devices)))

    def host_layout(self, num_devices: int) -> PartitionLayout:
        """Return the layout for the host, with larger tasklets in large models, so that fewer are simulated."""
        return self._layout(num_devices, max(HOST_TASKLET_BYTES, self._enough_bytes(1)))

    def skipped_bytes(self, numel: int) -> int:
        """Return the bytes of an extent that the host does not read, since its parameters in memory contain them."""
        first = STATE_FORMATS[self.state_format].item_bytes(self.num_arrays)[0]
        return -(-first * numel // BLOCK_BYTES) * BLOCK_BYTES if first == self.parameter_bytes else 0

    def _enough_bytes(self, num_rings: int) -> int:
        """Return the tasklet size at which each ring has :data:`ENOUGH_TASKLETS`."""
        return -(-self.array_bytes * self.numel // (num_rings * ENOUGH_TASKLETS))

    def _layout(self, num_devices: int, usual_bytes: int) -> PartitionLayout:
        whole = ParameterSlice(name="all", numel=self.numel, real_numel=self.numel, group=0, sub_group=0)
        return build_layout(
            [whole],
            tasklet_bytes=self.tasklet_bytes or usual_bytes,
            num_arrays=self.num_arrays,
            num_devices=num_devices,
            places_per_tasklet=2,
            state_format=self.state_format,
        )
