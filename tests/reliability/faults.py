"""Trainings on a disk that does its worst, and trainings that resume from what an interrupted one has left."""

from __future__ import annotations

import functools
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import lightning.pytorch as pl
import numpy as np
import torch
from numpy.typing import NDArray

from lightning_smartinfinity import SmartInfinityStrategy, SmartSSDConfig, TopK, TransferConfig
from lightning_smartinfinity.native import IoClass, IoScheduler, MemoryPool, StateFile, TensorStore
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage.io import scheduling
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import FaultCounts, Hold, inject
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, await_that, join

T = TypeVar("T")

CARD = "card"
"""The engine of an emulated SmartSSD; all others are the host's, by the names of ``io_engines()``."""

_RECIPE = Recipe(precision="bf16-mixed", width=64, depth=1)
_STEPS = 4
_PARAMETERS_ON_STORAGE: dict[str, Any] = {
    "offload_param": {"device": "nvme"},
    "stage3_param_persistence_threshold": 0,
}


@dataclass(frozen=True)
class Fault:
    """What the disk does to a training, from its second step on.

    Args:
        name: What it is called in the table.
        counted: Name of the member of ``FaultCounts`` that counts it; None if it is held.
        injected: Arguments of ``inject``, without the number of the request.
        at: Name of the argument that takes this number, of ``inject``, or of ``Hold`` if the request is held.
        harmless: Whether the training ends with the same bits, and nothing is raised.
    """

    name: str
    counted: str | None
    injected: dict[str, int] = field(default_factory=dict)
    at: str | None = None
    harmless: bool = False


FAULTS = {
    "flip": Fault("bit flip in what is read", "flipped", at="flip_read_at"),
    "block": Fault("read that returns another block", "misread", at="misread_at"),
    "extent": Fault("read that returns another block", "misread", {"misread_by": 1 << 16}, at="misread_at"),
    "lost": Fault("write that is reported done and lost", "lost", at="lose_write_at"),
    "read error": Fault("read or write that fails", "failed", at="fail_read_at"),
    "torn write": Fault("read or write that fails", "failed", at="fail_write_at"),
    "slow": Fault("slow and late transfers", "delayed", {"delay_us": 2000, "max_delay_us": 3000}, harmless=True),
    "short": Fault("short transfers", "shortened", {"short_transfer_every": 3, "max_delay_us": 500}, harmless=True),
    "hung read": Fault("read or write that is never answered", None, at="read_at"),
    "hung write": Fault("read or write that is never answered", None, at="write_at"),
}


@dataclass(frozen=True)
class Place:
    """What the disk of a training holds, and how it is used.

    Args:
        file: ``state``, ``parameters`` or ``gradients``: the file that the fault is in.
        engine: :data:`CARD`, or a name of ``io_engines()``.
        overlap: As the strategy's.
        crowded: Whether all requests wait for their turn, because of a neighbour on the device.
        xclbin: Kernels of the card.
    """

    file: str
    engine: str
    overlap: str
    crowded: bool = False
    xclbin: Path | None = None

    def __str__(self) -> str:
        return f"{'crowded-' if self.crowded else ''}{self.file}-{self.engine}-{self.overlap}"

    @property
    def described(self) -> str:
        """The file, as the table calls it."""
        if self.engine == CARD:
            return f"the {self.file} on SmartSSDs"
        return f"the {self.file} in a training" + " that waits for other requests" * self.crowded


@dataclass(frozen=True)
class Outcome:
    """The bits that a training ends with.

    Args:
        losses: One of each step.
        state: Arrays of the optimizer state, each of all elements.
        parameters: In the order of the model.
    """

    losses: list[float]
    state: list[NDArray[np.float32]]
    parameters: list[torch.Tensor]

    def assert_same(self, other: Outcome) -> None:
        """Assert that every bit is equal."""
        assert self.losses == other.losses
        for array, expected in zip(self.state, other.state, strict=True):
            np.testing.assert_array_equal(array, expected)
        for values, wanted in zip(self.parameters, other.parameters, strict=True):
            assert torch.equal(values, wanted)


class Neighbour:
    """Uses a device from a thread of its own: each of its requests is slow, and runs alone.

    Args:
        file: A file that it makes on the device.
        scheduler: The device's.
    """

    _BYTES = 1 << 20  # more than a ring

    def __init__(self, file: Path, scheduler: IoScheduler) -> None:
        file.touch()
        self._store = TensorStore([StateFile(str(file), direct=False, scheduler=scheduler)])
        inject(self._store, delay_us=10_000)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write, name="neighbour")
        self._thread.start()

    def close(self) -> None:
        """Stop it. What it has begun is waited for."""
        self._ended.set()
        join(self._thread)
        self._store.close()

    def _write(self) -> None:
        extent, memory = self._store.allocate(self._BYTES), MemoryPool().take(self._BYTES)
        where = {"address": memory.address, "nbytes": memory.nbytes}
        while not self._ended.is_set():
            assert self._store.wait(self._store.write(extent, offset=0, io_class=IoClass.BACKGROUND, **where)) is None


def when_idle(function: Callable[[], T]) -> T:
    """Return what a function returns that injects faults, once no request is in flight: reads ahead may be."""
    found: list[T] = []

    def is_done() -> bool:
        with suppress(ValueError):
            found.append(function())
        return bool(found)

    await_that(is_done, told=lambda: "(is a request in flight for ever, or an argument wrong?)")
    return found[0]


class FaultyDisk(pl.Callback):
    """Lets a disk do its worst from the second step on, and reads state and parameters at the end.

    Args:
        place: Where it does so.
        fault: What it does; ``None``: it works.
        number: Number of the read or write that it does it to.

    Attributes:
        fired: How many requests the fault had an effect on, once the training has ended.
        counts: Counts of the requests, unless one is held.
    """

    def __init__(self, place: Place, fault: Fault | None, number: int) -> None:
        self._place = place
        self._fault = fault
        self._number = number
        self._hold: Hold | None = None
        self.counts: FaultCounts | None = None
        self.fired = 0
        self.state: list[NDArray[np.float32]] = []
        self.parameters: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step != 1:
            return
        worker, fault = self._worker(trainer), self._fault
        where: dict[str, Any] = {"gradients": True} if self._place.file == "gradients" else {}
        at = {} if fault is None or fault.at is None else {fault.at: self._number}
        if fault is not None and fault.counted is None:
            self._hold = when_idle(lambda: Hold(worker, **where, **at))
        else:
            injected = {} if fault is None else fault.injected
            self.counts = when_idle(lambda: inject(worker, seed=self._number, **where, **injected, **at))

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        windows: list[list[NDArray[np.float32]]] = []

        def keep(window: Window) -> None:
            windows.append([array.copy() for array in window.arrays])

        _handler(trainer).state.scan(keep)
        self.state = [np.concatenate(parts) for parts in zip(*windows, strict=True)]
        for param in pl_module.parameters():
            absent = param.ds_tensor.numel() == 0
            values = param.nvme_swapper.read_partition(param) if absent else param.ds_tensor
            self.parameters.append(values.flatten().clone())

    def close(self) -> None:
        """Count what the fault did, and answer what was held."""
        if self._hold is not None:
            self.fired = self._hold.count
            self._hold.release()
        elif self._fault is not None and self.counts is not None:
            self.fired = getattr(self.counts, str(self._fault.counted))

    def _worker(self, trainer: pl.Trainer) -> Any:
        strategy: Any = trainer.strategy
        if self._place.file == "parameters":
            return strategy._parameters.store.core
        device = _handler(trainer)._device
        return device._workers[0].pipeline if self._place.engine == CARD else device.pipeline


def _handler(trainer: pl.Trainer) -> Any:
    return trainer.strategy.optimizers[0].update.drained_handler()  # type: ignore[attr-defined]


def _strategy(folder: Path, place: Place, *, timeout: float) -> SmartInfinityStrategy:
    on_card = place.engine == CARD
    transfer = TransferConfig(
        tasklet_bytes="64KiB",
        num_buffers=4,
        io_engine="auto" if on_card else place.engine,
        io_timeout=timeout,
    )
    settings: dict[str, Any] = {}
    if on_card:
        route = "storage" if place.file == "gradients" else "host"
        config = SmartSSDConfig(xclbin=place.xclbin, gradient_route=route, timeout=timeout)
        settings = {"update_device": "smartssd", "smartssd": config}
    if place.file == "parameters":
        settings["zero"] = _PARAMETERS_ON_STORAGE
    folders = [folder / f"ssd{number}" for number in range(2 if on_card else 1)]
    return SmartInfinityStrategy(folders, transfer=transfer, overlap=place.overlap, **settings)


@contextmanager
def crowded(folder: Path) -> Iterator[None]:
    """Let what is stored in a folder meanwhile take turns with a neighbour, and assert that something waited for it."""
    folder.mkdir(parents=True, exist_ok=True)
    scheduler = IoScheduler(in_flight_bytes=1)
    with mock.patch.dict(scheduling._schedulers, {os.stat(folder).st_dev: scheduler}):
        neighbour = Neighbour(folder / "neighbour", scheduler)
        try:
            yield
        finally:
            neighbour.close()
    waited = [waiting for waiting, other, requests, *_ in scheduler.waits() if other == "background" and requests]
    assert set(waited) - {"background"}


def trained(folder: Path, disk: FaultyDisk, place: Place, *, timeout: float = 10 * LIMIT) -> Outcome:
    """Train on a disk, and return what is there at the end."""
    strategy = _strategy(folder, place, timeout=timeout)
    with ExitStack() as opened:
        if place.crowded:
            opened.enter_context(crowded(folder))
        opened.callback(strategy.close)
        opened.callback(disk.close)
        trainer = quiet_trainer(folder, strategy, max_steps=_STEPS, callbacks=[disk])
        module = LitTiny(_RECIPE)
        trainer.fit(module)
    return Outcome(module.losses, disk.state, disk.parameters)


@functools.cache
def undisturbed(folder: Path, place: Place) -> tuple[Outcome, FaultCounts]:
    """Return what a training over a disk that works ends with, and its requests; overlap changes no bit of it."""
    disk = FaultyDisk(place, None, 0)
    outcome = trained(folder, disk, place)
    assert disk.counts is not None
    return outcome, disk.counts


# ---- interrupted trainings with compressed gradients, whose files are damaged before they resume from storage

_SMALL = Recipe(depth=1, width=8, max_steps=4, precision="32-true")

Bits = list[torch.Tensor]
"""A training's result: its residual and all masters."""


class _Broken(Exception):
    pass


class _Breaking(LitTiny):
    """A module that raises within its third step."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            raise _Broken


class Interrupted:
    """Holds the state that an interrupted training has left in a folder.

    Args:
        root: An empty folder.
        recipe: Recipe of the training.
        overlap: As the strategy's.

    Attributes:
        folder: The rank's folder, in which files may be damaged before :meth:`resumed`.
        expected: Bits that the training ends with if nothing interrupts it.
    """

    def __init__(self, root: Path, recipe: Recipe = _SMALL, *, overlap: str = "none") -> None:
        self._root, self._saved, self._recipe, self._overlap = root, root / "saved", recipe, overlap
        self.expected = self._bits(LitTiny(recipe), root / "straight")
        try:
            self._bits(_Breaking(recipe), root / "state")
        except _Broken:
            shutil.copytree(root / "state", self._saved)
        self.folder = root / "state" / "default" / "rank-00000"

    def restore(self) -> None:
        """Put all files into their place again as the interrupted training has left them."""
        shutil.rmtree(self._root / "state", ignore_errors=True)
        shutil.copytree(self._saved, self._root / "state")

    def resumed(self) -> Bits:
        """Resume; return the bits that the training ends with."""
        return self._bits(LitTiny(self._recipe), self._root / "state", ckpt_path="storage")

    def _bits(self, module: LitTiny, storage: Path, **how: Any) -> Bits:
        transfer = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}
        strategy = SmartInfinityStrategy(storage, compression=TopK(0.05), overlap=self._overlap, transfer=transfer)
        try:
            quiet_trainer(self._root, strategy, max_steps=self._recipe.max_steps, precision="32-true").fit(
                module, **how
            )
            strategy.drain()
            optimizer: Any = strategy._training_optimizer
            masters: Bits = []
            optimizer.rank_state.handler.state.scan(
                lambda window: masters.append(torch.from_numpy(window.arrays[0].copy()))
            )
            return [optimizer.rank_state.residual.clone(), *masters]
        finally:
            strategy.close()


def same(found: Bits, expected: Bits) -> bool:
    """Return whether every bit is equal."""
    return len(found) == len(expected) and all(map(torch.equal, found, expected))
