"""A Lightning callback that logs the storage traffic."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.trainer.metrics import Phase, StorageCounters, TrafficTable, traffic_between
from lightning_smartinfinity.settings.rules import between, check, optional, positive
from lightning_smartinfinity.settings.wrong_names import named_settings

if TYPE_CHECKING:
    from lightning_smartinfinity.devices.base import Traffic

__all__ = ["StorageTrafficMonitor"]

_GB = 1e9
_TB = 1e12
_GIB = 2**30
_PROG_BAR = ("io/GBps", "io/wait_s")
_CHANNELS = (("shared", "read"), ("shared", "write"), ("internal", "read"), ("internal", "write"))
_CACHED = (("cached", "read"), ("cached", "write"))
_MOVED = tuple(f"{channel}_{direction}_bytes" for channel, direction in _CHANNELS)
_WRITTEN = "storage_write_bytes"
_TOTALS = (*_MOVED, _WRITTEN)
_ENDURANCE = replace(
    optional(positive()), remedy="Pass the terabytes that the disk's data sheet allows to be written, or None"
)


@runtime_checkable
class _CountsTraffic(Protocol):
    """The methods of a strategy that the monitor needs."""

    @property
    def host_bytes(self) -> dict[str, int]: ...

    def traffic(self) -> Traffic: ...

    def drain(self) -> None: ...


@named_settings
class StorageTrafficMonitor(Callback):
    """Logs the storage traffic of the optimizer state and the time spent waiting for it.

    Values are averages per optimizer step since the last measurement, and totals; both over all ranks.
    ``pl_module.log_dict`` passes them to every logger and to ``trainer.callback_metrics``. Totals continue after a
    resume, so that they cover the whole job. Measuring costs one collective per logged step and nothing in between.

    ======================================  ==========================================================================
    Name                                    Meaning
    ======================================  ==========================================================================
    ``io/shared_read_GB``, ``..write_GB``   read and written over the shared channel, to and from the host, per step
    ``io/internal_read_GB``, ``..write_GB`` read and written inside storage devices, per step
    ``io/cached_read_GB``, ``..write_GB``   saved by ``dram_cache_bytes``, per step; not included in the values below
    ``io/background_read_GB``               read per step during training, for checkpoints; not included below
    ``io/activation_read_GB``               activations read per step (this and the next two: with ``activations``
                                            only); not included in the values below
    ``io/activation_write_GB``              activations written per step; of the values below, included in the totals
                                            of written bytes only
    ``io/activation_wait_s``                seconds that forward and backward waited for them per step, slowest rank
    ``io/GBps``                             all bytes read and written per second of training
    ``io/wait_GBps``                        the same per second waited: the storage's own speed if nothing overlaps
    ``io/wait_s``                           seconds waited for storage per step, slowest rank
    ``io/gradient_wait_s``                  seconds that backward waited for gradients on their way from a GPU per
                                            step, slowest rank
    ``io/wait_share``                       share of the training time spent waiting for storage, slowest rank
    ``io/folder0_GB``, ``..share``, ...     for each storage folder, if there are several: bytes moved per step, their
                                            share of all bytes moved, and bytes per busy second (``..GBps``)
    ``io/compute_s``                        thread-seconds of the update per step, mean of the ranks
    ``io/cpu_s_per_GiB``                    CPU time of the I/O threads per GiB over both channels
    ``io/bytes_per_parameter``              moved per updated parameter over both channels
    ``io/shared_bytes_per_parameter``       moved per updated parameter over the shared channel
    ``io/total_shared_read_TB``, ...        read or written per channel since the job began (four names)
    ``io/written_TB``                       written to storage since the job began, which is what wears it out
    ``io/projected_TB``                     predicted ``io/written_TB`` at the end of the run (not for endless runs)
    ``io/endurance_share``                  ``io/projected_TB`` over ``endurance_tbw`` (with ``endurance_tbw`` only)
    ``io/host_GB``                          host memory that the update and the pool of activations hold
    ``io/residual_GB``                      the part of it that the residual holds (with error feedback only)
    ======================================  ==========================================================================

    Args:
        prog_bar: Show ``io/GBps`` and ``io/wait_s`` in the progress bar.
        every_n_steps: Optimizer steps between measurements; default: the Trainer's ``log_every_n_steps``.
        endurance_tbw: Terabytes that may be written in the storage's rated life (sum of all disks that hold the state).

    Raises:
        ConfigError: A setting is out of range, or loggers would miss measurements.
        UnsupportedError: The Trainer's strategy keeps no optimizer state on storage.

    Example::

        Trainer(strategy="smart_infinity", callbacks=[StorageTrafficMonitor(endurance_tbw=600)])
    """

    def __init__(
        self, *, prog_bar: bool = True, every_n_steps: int | None = None, endurance_tbw: float | None = None
    ) -> None:
        super().__init__()
        check("StorageTrafficMonitor", "every_n_steps", every_n_steps, optional(between(1)))
        check("StorageTrafficMonitor", "endurance_tbw", endurance_tbw, _ENDURANCE)
        self._prog_bar = prog_bar
        self._every_n_steps = every_n_steps
        self._endurance_tbw = endurance_tbw
        self._clock: Callable[[], float] = time.perf_counter
        self._watch: _Watch | None = None
        self._carried = dict.fromkeys(_TOTALS, 0)
        self._summary: dict[str, float] = {}

    @property
    def summary(self) -> dict[str, float]:
        """The metrics above over the whole of the last completed fit; empty before the first."""
        return dict(self._summary)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        _check_strategy(trainer.strategy)
        _check_cadence(self._every_n_steps, trainer)
        self._watch, self._summary = None, {}
        self._carried = dict.fromkeys(_TOTALS, 0)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watch = _Watch(trainer, self._clock)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watched().begin(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._watched().switch(Phase.STEP)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._watched().is_due(trainer.global_step, self._every_n_steps or _log_every_n_steps(trainer)):
            values = self._measure(trainer.global_step)
            rest = {name: value for name, value in values.items() if name not in _PROG_BAR}
            options: dict[str, Any] = {"on_step": True, "on_epoch": False, "batch_size": 1}
            options["logger"] = bool(trainer.loggers)
            pl_module.log_dict({name: values[name] for name in _PROG_BAR}, prog_bar=self._prog_bar, **options)
            pl_module.log_dict(rest, **options)

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._leave_steps()

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        # The strategy reads the state after this hook. The next batch switches back.
        self._leave_steps()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._watched().end()
        self._summary = self._measure(trainer.global_step)
        totals = {name: value for name, value in self._summary.items() if name.endswith("_TB")}
        for logger in trainer.loggers:
            logger.log_metrics(totals, step=trainer.global_step)

    @override
    def state_dict(self) -> dict[str, Any]:
        # Lightning may call this on one rank only, so there is no collective; all ranks' partitions have the same size.
        moved = {} if self._watch is None else self._watch.estimated_bytes()
        return {name: self._carried[name] + moved.get(name, 0) for name in _TOTALS}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._carried = {name: int(state_dict.get(name, 0)) for name in _TOTALS}

    def _leave_steps(self) -> None:
        if self._watch is not None:
            self._watch.leave_steps()

    def _watched(self) -> _Watch:
        assert self._watch is not None
        return self._watch

    def _measure(self, step: int) -> dict[str, float]:
        """Synchronize the counters; return the values since the last measurement, and the totals."""
        watch = self._watched()
        recent, num_steps = watch.measure(step)
        totals = {name: self._carried[name] + _moved(watch.overall, name) for name in _TOTALS}
        written = totals[_WRITTEN]
        values = _step_values(recent, max(1, num_steps))
        if watch.offloads_activations:
            values |= _activation_values(recent, max(1, num_steps))
        values |= {f"io/total_{name.removesuffix('_bytes')}_TB": totals[name] / _TB for name in _MOVED}
        values["io/written_TB"] = written / _TB
        values |= watch.memory_values()
        if (coming := watch.bytes_to_be_written(step)) is not None:
            values["io/projected_TB"] = (written + coming) / _TB
            if self._endurance_tbw is not None:
                values["io/endurance_share"] = values["io/projected_TB"] / self._endurance_tbw
        return values


class _Watch:
    """The traffic of one fit, divided between training steps and everything else.

    Args:
        trainer: Trainer whose strategy counts traffic, from zero at the start of the fit.
        clock: Function that returns seconds.
    """

    def __init__(self, trainer: pl.Trainer, clock: Callable[[], float]) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, _CountsTraffic)
        self._read = strategy.traffic
        self._strategy = strategy
        self._clock = clock
        self._world_size = trainer.world_size
        self._phase = Phase.OTHER
        self._last: Traffic | None = None
        self._since = clock()
        # Collectives may need tensors on the accelerator. A CPU device has an index that tensors do not accept.
        device = strategy.root_device
        num_folders = len(strategy.traffic().folders)
        counters = StorageCounters(num_folders=num_folders if num_folders > 1 else 0)
        self._counters = counters.to("cpu" if device.type == "cpu" else device)

    def begin(self, trainer: pl.Trainer) -> None:
        self._first_step = self._measured_step = trainer.global_step
        self._last_step = float(trainer.estimated_stepping_batches)
        self._measured: TrafficTable | None = None

    def end(self) -> None:
        """Make the next measurement cover the whole fit."""
        self.leave_steps()
        self._measured_step, self._measured = self._first_step, None

    def is_due(self, step: int, every: int) -> bool:
        # Every rank must reach the same decision, because measuring is a collective.
        return every > 0 and step // every > self._measured_step // every

    def switch(self, phase: Phase) -> None:
        """Count traffic under ``phase`` from now on."""
        if phase is not self._phase:
            self._fold()
            self._phase = phase

    def leave_steps(self) -> None:
        """Finish the last step's update, which counts as the step's traffic, and count the rest under OTHER."""
        if self._phase is Phase.STEP:
            self._strategy.drain()
        self.switch(Phase.OTHER)

    def measure(self, step: int) -> tuple[TrafficTable, int]:
        """Return all ranks' counters of the steps since the last measurement, and the number of steps. Collective."""
        self._fold()
        computed = self._counters.compute().cpu()
        self.overall, self.in_steps = StorageCounters.table(computed), StorageCounters.table(computed, Phase.STEP)
        recent = self.in_steps if self._measured is None else self.in_steps - self._measured
        num_steps = step - self._measured_step
        self._measured, self._measured_step = self.in_steps, step
        return recent, num_steps

    def bytes_to_be_written(self, step: int) -> float | None:
        """Predict all ranks' bytes from ``step`` to the run's end, at the rate so far; None if the run has no end."""
        num_steps = step - self._first_step
        if num_steps == 0 or not 0 < self._last_step < math.inf:
            return None
        return _moved(self.in_steps, _WRITTEN) / num_steps * max(0, self._last_step - step)

    @property
    def offloads_activations(self) -> bool:
        return "activations" in self._strategy.host_bytes

    def memory_values(self) -> dict[str, float]:
        """Return the host memory of all ranks; each holds as much as this one, as partitions have the same size."""
        held = self._strategy.host_bytes
        values = {"io/host_GB": self._world_size * sum(held.values()) / _GB}
        if "residual" in held:
            values["io/residual_GB"] = self._world_size * held["residual"] / _GB
        return values

    def estimated_bytes(self) -> dict[str, int]:
        """Return the bytes of all ranks by counter, estimated from this rank's counters without a collective."""
        self._fold()
        own = StorageCounters.table(self._counters.counters.unsqueeze(0).cpu())
        return {name: self._world_size * _moved(own, name) for name in _TOTALS}

    def _fold(self) -> None:
        now, clock = self._read(), self._clock()
        change = now if self._last is None else traffic_between(self._last, now)
        self._counters.update(change, seconds=clock - self._since, phase=self._phase)
        self._last, self._since = now, clock


def _step_values(table: TrafficTable, steps: int) -> dict[str, float]:
    wait = float(table.seconds("wait_seconds").max())
    wall = float(table.seconds("wall_seconds").max())
    values = {
        f"io/{channel}_{direction}_GB": float(table.moved_bytes(channel, direction)) / steps / _GB
        for channel, direction in (*_CHANNELS, *_CACHED)
    }
    values["io/background_read_GB"] = float(table.column("background_read_bytes").sum()) / steps / _GB
    return (
        values
        | _folder_values(table, steps)
        | {
            "io/GBps": float(table.bandwidth()) / _GB,
            "io/wait_GBps": float(table.bandwidth(per="wait_seconds")) / _GB,
            "io/wait_s": wait / steps,
            "io/gradient_wait_s": float(table.seconds("gradient_wait_seconds").max()) / steps,
            "io/wait_share": wait / wall if wall > 0 else math.nan,
            "io/compute_s": float(table.seconds("compute_seconds").mean()) / steps,
            "io/cpu_s_per_GiB": float(table.io_cpu_seconds_per_byte()) * _GIB,
            "io/bytes_per_parameter": float(table.bytes_per_parameter()),
            "io/shared_bytes_per_parameter": float(table.bytes_per_parameter("shared")),
        }
    )


def _activation_values(table: TrafficTable, steps: int) -> dict[str, float]:
    return {
        "io/activation_read_GB": _moved(table, "activation_read_bytes") / steps / _GB,
        "io/activation_write_GB": _moved(table, "activation_write_bytes") / steps / _GB,
        "io/activation_wait_s": float(table.seconds("activation_wait_seconds").max()) / steps,
    }


def _folder_values(table: TrafficTable, steps: int) -> dict[str, float]:
    moved, bandwidths = table.folder_bytes().tolist(), table.folder_bandwidth().tolist()
    values = {}
    for index, (num_bytes, bandwidth) in enumerate(zip(moved, bandwidths, strict=True)):
        values[f"io/folder{index}_GB"] = num_bytes / steps / _GB
        values[f"io/folder{index}_share"] = num_bytes / sum(moved) if sum(moved) else math.nan
        values[f"io/folder{index}_GBps"] = bandwidth / _GB
    return values


def _moved(table: TrafficTable, name: str) -> int:
    return int(table.column(name).sum())


def _log_every_n_steps(trainer: pl.Trainer) -> int:
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]  # set outside Trainer's own code


def _check_strategy(strategy: object) -> None:
    if not isinstance(strategy, _CountsTraffic):
        raise UnsupportedError(
            f"StorageTrafficMonitor has nothing to watch with {type(strategy).__name__}.",
            'Train with Trainer(strategy="smart_infinity") or remove the callback.',
        )


def _check_cadence(every_n_steps: int | None, trainer: pl.Trainer) -> None:
    logged = _log_every_n_steps(trainer)
    if every_n_steps is None or not trainer.loggers or logged == 0:
        return
    if logged % every_n_steps != 0 and every_n_steps % logged != 0:
        raise ConfigError(
            f"StorageTrafficMonitor(every_n_steps={every_n_steps}) does not meet "
            f"Trainer(log_every_n_steps={logged}): loggers would miss measurements.",
            "Let one be a multiple of the other.",
        )
