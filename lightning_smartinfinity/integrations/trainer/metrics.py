"""torchmetrics metrics over a strategy's traffic counters.

Each metric is updated with the traffic of an interval, and reduces over ranks when it is computed::

    before = strategy.traffic()
    ...                                     # train
    metric = StorageBytes(channel="shared", direction="write")
    metric.update(traffic_between(before, strategy.traffic()))
    metric.compute()                        # bytes that all ranks wrote

Bytes and counts are int64, and times are int64 nanoseconds, all in one tensor. So terabytes are exact, converting a
module to a 16-bit dtype does not change them, and synchronizing a metric costs one collective.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_smartinfinity.settings.rules import check, one_of

if TYPE_CHECKING:
    from lightning_smartinfinity.devices.base import Traffic

__all__ = [
    "BytesPerParameter",
    "Phase",
    "StorageBandwidth",
    "StorageBytes",
    "StorageCounters",
    "StorageWait",
    "TrafficTable",
    "traffic_between",
]

_COUNTS = (
    "steps",
    "numel",
    "shared_read_bytes",
    "shared_write_bytes",
    "internal_read_bytes",
    "internal_write_bytes",
    "storage_write_bytes",
    "cached_read_bytes",
    "cached_write_bytes",
    "padding_bytes",
    "control_bytes",
    "background_read_bytes",
    "activation_read_bytes",
    "activation_write_bytes",
    "read_calls",
    "write_calls",
)
_SECONDS = (
    "read_seconds",
    "write_seconds",
    "compute_seconds",
    "kernel_seconds",
    "wait_seconds",
    "io_cpu_seconds",
    "activation_wait_seconds",
    "gradient_wait_seconds",
)
_FIELDS = (*_COUNTS, *_SECONDS, "wall_seconds")
_FOLDER_FIELDS = ("read_bytes", "write_bytes", "busy_seconds")  # per storage folder, after the other columns
_COLUMNS = {name: index for index, name in enumerate(_FIELDS)}

# Cached bytes use neither channel and are not part of "all".
_CHANNELS = {"shared": ("shared",), "internal": ("internal",), "all": ("shared", "internal"), "cached": ("cached",)}
_DIRECTIONS = {"read": ("read",), "write": ("write",), "both": ("read", "write")}
_NANOSECONDS = 1_000_000_000


class Phase(enum.IntEnum):
    """The activity that traffic belongs to."""

    STEP = 0
    """Traffic of training steps."""
    OTHER = 1
    """Traffic of everything else: initialisation, validation, checkpoints."""


def traffic_between(before: Traffic, after: Traffic) -> Traffic:
    """Return the traffic between two readings of the same counters.

    Args:
        before: The earlier reading of ``strategy.traffic()``.
        after: The later reading.

    Returns:
        The difference of each field; ``after`` itself if the counters were reset in between (by a new store).
    """
    change = after - before
    if any(getattr(change, name) < 0 for name in (*_COUNTS, *_SECONDS)):
        return after
    return change


@dataclasses.dataclass(frozen=True)
class TrafficTable:
    """Counters of an interval, one row per rank.

    Args:
        rows: int64 tensor of shape ``[ranks, counters]``; times in nanoseconds.
    """

    rows: Tensor

    def __sub__(self, other: TrafficTable) -> TrafficTable:
        return TrafficTable(self.rows - other.rows)

    def __add__(self, other: TrafficTable) -> TrafficTable:
        return TrafficTable(self.rows + other.rows)

    def column(self, name: str) -> Tensor:
        """Return one counter of every rank, int64 ``[ranks]``."""
        return self.rows[:, _COLUMNS[name]]

    def seconds(self, name: str) -> Tensor:
        """Return one time of every rank in seconds, float64 ``[ranks]``."""
        return self.column(name).to(torch.float64) / _NANOSECONDS

    def folder_bytes(self) -> Tensor:
        """Return the bytes read from and written to each folder, summed over ranks, int64 ``[folders]``."""
        return self._of_folders()[..., :2].sum(dim=(0, 2))

    def folder_bandwidth(self) -> Tensor:
        """Return each folder's bytes per second, by the rank that kept it busy longest, float64 ``[folders]``."""
        seconds = self._of_folders()[..., 2].amax(dim=0).to(torch.float64) / _NANOSECONDS
        return _ratio(self.folder_bytes(), seconds)

    def _of_folders(self) -> Tensor:
        return self.rows[:, len(_FIELDS) :].reshape(len(self.rows), -1, len(_FOLDER_FIELDS))

    def moved_bytes(self, channel: str = "all", direction: str = "both") -> Tensor:
        """Return the bytes moved over a channel in a direction, summed over ranks: int64 scalar."""
        columns = [f"{one}_{way}_bytes" for one in _CHANNELS[channel] for way in _DIRECTIONS[direction]]
        return torch.stack([self.column(name) for name in columns]).sum()

    def bandwidth(self, channel: str = "all", direction: str = "both", *, per: str = "wall_seconds") -> Tensor:
        """Return the bytes of all ranks per second of the slowest rank: float64 scalar, NaN without time."""
        return _ratio(self.moved_bytes(channel, direction), self.seconds(per).max())

    def io_cpu_seconds_per_byte(self) -> Tensor:
        """Return the I/O threads' CPU time per byte moved: float64 scalar, NaN if nothing was moved."""
        return _ratio(self.seconds("io_cpu_seconds").sum(), self.moved_bytes("all"))

    def bytes_per_parameter(self, channel: str = "all", direction: str = "both") -> Tensor:
        """Return the bytes moved per updated element: float64 scalar, NaN if nothing was updated."""
        return _ratio(self.moved_bytes(channel, direction), self.column("numel").sum())


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    numerator, denominator = numerator.to(torch.float64), denominator.to(torch.float64)
    return torch.where(denominator > 0, numerator / denominator, torch.full_like(denominator, float("nan")))


class StorageCounters(Metric):
    """All traffic counters of all ranks; base class of the metrics below.

    Args:
        num_folders: Number of storage folders with counters of their own.
        kwargs: Keyword arguments of torchmetrics (``process_group``, ``sync_on_compute``, ...).
    """

    is_differentiable = False
    # Wall time adds up over updates but not over ranks, so merging states as torchmetrics does by default is wrong.
    full_state_update = True

    counters: Tensor

    def __init__(self, *, num_folders: int = 0, **kwargs: Any) -> None:
        kwargs.setdefault("dist_sync_fn", _gather_fixed_shape)
        super().__init__(**kwargs)
        self.num_folders = num_folders
        # Without a reduction torchmetrics stacks the ranks' states, so compute can sum or maximize each column.
        empty = torch.zeros(len(Phase), self._width, dtype=torch.int64)
        self.add_state("counters", default=empty, dist_reduce_fx=None)

    @override
    def update(self, traffic: Traffic, *, seconds: float = 0.0, phase: Phase = Phase.STEP) -> None:
        """Add the traffic of one interval on this rank.

        Args:
            traffic: Counters of the interval (see :func:`traffic_between`), not since the start.
            seconds: Wall time of the interval.
            phase: Activity of the interval.
        """
        values = [int(getattr(traffic, name)) for name in _COUNTS]
        values += [round(getattr(traffic, name) * _NANOSECONDS) for name in _SECONDS]
        values.append(round(seconds * _NANOSECONDS))
        for folder in traffic.folders[: self.num_folders]:
            values += [folder.read_bytes, folder.write_bytes, round(folder.busy_seconds * _NANOSECONDS)]
        values += [0] * (self._width - len(values))  # closed storage has no folders
        # Not in place: an earlier result of compute() shares memory with the state.
        counters = self.counters.clone()
        counters[int(phase)] += torch.tensor(values, dtype=torch.int64, device=counters.device)
        self.counters = counters

    @override
    def compute(self) -> Tensor:
        """Return the counters as int64 ``[ranks, phases, counters]``; see :meth:`table`."""
        return self.counters.reshape(-1, len(Phase), self._width)

    @property
    def _width(self) -> int:
        return len(_FIELDS) + self.num_folders * len(_FOLDER_FIELDS)

    @staticmethod
    def table(computed: Tensor, phase: Phase | None = None) -> TrafficTable:
        """Return the rows of one phase, or of all phases together, from the result of :meth:`compute`."""
        return TrafficTable(computed.sum(dim=1) if phase is None else computed[:, int(phase)])

    def _table(self, phase: Phase | None = None) -> TrafficTable:
        return self.table(self.counters.reshape(-1, len(Phase), self._width), phase)


class _BytesMoved(StorageCounters):
    """Counts bytes by channel and direction; base class of the metrics below that take both."""

    def __init__(self, channel: str = "all", direction: str = "both", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.channel = check(type(self).__name__, "channel", channel, one_of(*_CHANNELS))
        self.direction = check(type(self).__name__, "direction", direction, one_of(*_DIRECTIONS))


class StorageBytes(_BytesMoved):
    """Bytes moved in all phases, summed over ranks: int64 scalar.

    Args:
        channel: ``"shared"`` (host and devices), ``"internal"`` (inside one device), ``"all"`` (both), or ``"cached"``
            (bytes that ``dram_cache_bytes`` of host memory saved on both).
        direction: ``"read"``, ``"write"`` or ``"both"``.
        kwargs: Keyword arguments of torchmetrics.

    Raises:
        ConfigError: The channel or direction is unknown.
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        return self._table().moved_bytes(self.channel, self.direction)


class StorageBandwidth(_BytesMoved):
    """Bytes per second in steps: the bytes of all ranks over the time of the slowest rank, float64 scalar.

    Args:
        channel: ``"shared"``, ``"internal"``, ``"all"`` or ``"cached"``, as for :class:`StorageBytes`.
        direction: ``"read"``, ``"write"`` or ``"both"``.
        per: ``"wall"`` divides by seconds of the interval: the load on the storage. ``"wait"`` divides by seconds that
            training waited: the storage's own bandwidth if nothing overlaps the update.
        kwargs: Keyword arguments of torchmetrics.

    Raises:
        ConfigError: The channel, direction or time is unknown.
    """

    higher_is_better = True

    def __init__(self, channel: str = "all", direction: str = "both", per: str = "wall", **kwargs: Any) -> None:
        super().__init__(channel, direction, **kwargs)
        self.per = check(type(self).__name__, "per", per, one_of("wall", "wait"))

    @override
    def compute(self) -> Tensor:
        return self._table(Phase.STEP).bandwidth(self.channel, self.direction, per=f"{self.per}_seconds")


class StorageWait(StorageCounters):
    """Seconds that training waited for storage in steps: float64 scalar.

    Args:
        over_ranks: ``"max"`` (the slowest rank, which all others wait for) or ``"mean"``.
        kwargs: Keyword arguments of torchmetrics.

    Raises:
        ConfigError: The reduction is unknown.
    """

    higher_is_better = False

    def __init__(self, over_ranks: str = "max", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.over_ranks = check(type(self).__name__, "over_ranks", over_ranks, one_of("max", "mean"))

    @override
    def compute(self) -> Tensor:
        waited = self._table(Phase.STEP).seconds("wait_seconds")
        return waited.max() if self.over_ranks == "max" else waited.mean()


class BytesPerParameter(_BytesMoved):
    """Bytes moved per updated element in steps, over all ranks: float64 scalar, NaN if nothing was updated.

    Args:
        channel: ``"shared"``, ``"internal"``, ``"all"`` or ``"cached"``, as for :class:`StorageBytes`.
        direction: ``"read"``, ``"write"`` or ``"both"``.
        kwargs: Keyword arguments of torchmetrics.

    Raises:
        ConfigError: The channel or direction is unknown.
    """

    higher_is_better = False

    @override
    def compute(self) -> Tensor:
        return self._table(Phase.STEP).bytes_per_parameter(self.channel, self.direction)


def _gather_fixed_shape(state: Tensor, group: Any = None) -> list[Tensor]:
    # torchmetrics' default adds a barrier and a gather of shapes; here all ranks have the same shape.
    gathered = [torch.empty_like(state) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(gathered, state.contiguous(), group=group)
    return gathered
