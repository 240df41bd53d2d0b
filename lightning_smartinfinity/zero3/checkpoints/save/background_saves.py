"""Saves the optimizer's state in the background, while training continues from the generation that is saved."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.errors import StorageFullError
from lightning_smartinfinity.pipeline.state.pinned_state import PinnedState
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage.io.deadlines import in_time, io_limit
from lightning_smartinfinity.zero3.checkpoints.folders.folder_swap import remove_interrupted, writing
from lightning_smartinfinity.zero3.checkpoints.formats.optimizer_state import ArrayWriter
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.ranks.collectives import background_group, gather, raise_together, raising_together
from lightning_smartinfinity.zero3.ranks.file_systems import device_of
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["BackgroundSaves"]

_TAG = "checkpoint"  # of Lightning's checkpoints
_NUM_BUFFERS = 2  # a window is then one tasklet, so that each write delays the training only briefly
_PAUSE = 6.0
"""Pause after each window, as a multiple of the time to write it. Steps during a save are at most 15 % slower."""


class BackgroundSaves:
    """The saves of a training in progress in the background: of one generation at a time, one after the other.

    Folders are put in place in the order in which the saves began, and removals are queued among them. All ranks must
    call the same methods in the same order.

    Args:
        optimizer: The optimizer whose state is saved.
        settings: Settings of the storage.

    Attributes:
        wanted: Whether the next save may return before the checkpoint is complete.
    """

    def __init__(self, optimizer: StorageOptimizer, settings: OffloadSettings) -> None:
        self._optimizer = optimizer
        self._settings = settings
        self._jobs = optimizer.rank_state.background
        self._generation = -1
        self._exists_then: dict[str, bool] = {}
        self._leads_on: dict[int, bool] = {}
        self._has_warned = False
        self.wanted = False

    def will_exist(self, path: str | Path) -> bool | None:
        """Return whether a path will exist after all queued jobs; None if no job saves to it or removes it."""
        return self._exists_then.get(os.path.abspath(path)) if self._jobs.any else None

    def note_leader(self, path: str | Path, *, leads: bool) -> None:
        """Record whether this rank leads on the file system of a save."""
        self._leads_on[device_of(Path(path))] = leads

    def leads_at(self, path: str | Path) -> bool:
        """Return whether this rank removes and links checkpoints on a path's file system, for all ranks that see it.

        On a file system without a save of this training, rank zero does.
        """
        return self._leads_on.get(device_of(Path(path)), dist.get_rank() == 0)

    def finish(self) -> None:
        """Wait until no save is in progress. Collective.

        Raises:
            SmartInfinityError: A save failed on some rank, and no step has reported it yet.
        """
        if self._jobs.any:
            failure = self._jobs.join()
            self._exists_then.clear()
            raise_together(failure, None)

    def make_room(self) -> None:
        """Reserve room on storage for background saves; if there is none, warn that training will wait for saves.

        Collective. The next save tries again.

        Raises:
            StorageError: A state file cannot be extended, for a reason other than a full disk.
        """
        handler = self._optimizer.update.drained_handler() if self._may_go_on() else None
        if handler is not None and not handler.writes_back:  # which has places for that
            self._has_room_for(handler.make_room_to_pin)

    def begin(self, path: str | Path, save: ExitStack) -> PinnedState | None:
        """Pin the state to save to a path; return None if the save cannot run in the background.

        Waits for a save in progress if that save is of another generation, or goes to the same path.

        Args:
            path: Path of the save.
            save: Contexts of the save; releases the pinned state when closed.

        Raises:
            SmartInfinityError: A save that this waited for has failed.
            StorageError, DeviceError, CudaError: The step in flight failed.
        """
        if not (self.wanted and self._may_go_on()):
            self.finish()
            if self._optimizer.rank_state.in_fit and self._optimizer.rank_state.writes_back:
                self._optimizer.update.drained_handler()
                self._optimizer.persistence.begin_save(pins=False)
            return None
        handler = self._optimizer.update.drained_handler()
        if handler.generation != self._generation or self.will_exist(path) is not None:
            self.finish()
        if not self._optimizer.persistence.begin_save(pins=True):  # state in memory, which a save cannot read later
            self.finish()
            return None
        pins: list[PinnedState] = []

        def pin() -> None:
            pins.append(handler.pin())
            save.callback(pins[0].release)

        if not self._has_room_for(pin):
            save.close()
            self.finish()
            return None
        self._generation = handler.generation
        return pins[0]

    def complete(self, save: ExitStack, path: str | Path, file: TensorFile, pinned: PinnedState) -> None:
        """Write the arrays in the background, and then leave the contexts of the save.

        Args:
            save: The contexts; another thread takes them over and leaves them.
            path: Path of the save.
            file: The file with room for the arrays.
            pinned: The pinned state.
        """
        write = ArrayWriter(self._optimizer, file)
        transfer, group = self._settings.transfer, background_group()
        device = HostDevice(num_buffers=_NUM_BUFFERS, io_engine=transfer.io_engine, io_timeout=transfer.io_timeout)
        contexts = save.pop_all()

        def copy() -> None:
            with io_limit(transfer.io_timeout), contexts, raising_together(group), writing(path):
                pinned.scan(device, self._in_turns(write))
                file.flush()

        self._exists_then[os.path.abspath(path)] = True
        self._jobs.start(copy)

    def remove(self, path: str | Path, remove: Callable[[], None]) -> None:
        """Remove a checkpoint after every save in progress has completed; if one fails, the checkpoint stays.

        Args:
            path: Path of the checkpoint.
            remove: Function that removes it; called on one rank per file system, with the limit of other file calls.
        """
        seconds = self._settings.transfer.io_timeout
        remove = partial(in_time, remove, doing="Removing", path=Path(path), seconds=seconds)
        if not self.leads_at(path):
            remove = _nothing
        if not self._jobs.any:
            remove()
            return
        self._exists_then[os.path.abspath(path)] = False
        self._jobs.start(remove, after_success=True)

    def remove_interrupted(self, path: str | Path) -> None:
        """Remove the remains of a killed process's save to a path. Collective."""
        remove_interrupted(path, _TAG)

    def _may_go_on(self) -> bool:
        transfer = self._settings.transfer
        return (
            transfer.asynchronous
            and transfer.places_per_tasklet > 1
            and self._settings.cards is None
            and self._optimizer.rank_state.residual is None
            and self._optimizer.rank_state.in_fit
        )

    def _has_room_for(self, take: Callable[[], None]) -> bool:
        """Reserve room on storage by ``take``, and return whether all ranks succeeded; if not, warn once."""
        problem = ""
        with raising_together():
            try:
                take()
            except StorageFullError as error:
                problem = error.problem
        problems = [each for each in gather(problem, None) if each]
        if problems:
            self._warn(problems[0])
        return not problems

    def _in_turns(self, write: Callable[[Window], object]) -> Callable[[Window], None]:
        """Return a function that writes a window and then pauses, to leave the disk to the training."""
        since = time.monotonic()

        def write_and_pause(window: Window) -> None:
            nonlocal since
            write(window)
            self._jobs.pause(_PAUSE * (time.monotonic() - since))
            since = time.monotonic()

        return write_and_pause

    def _warn(self, problem: str) -> None:
        if not self._has_warned and dist.get_rank() == 0:
            warnings.warn(
                f"Training waits for checkpoints, since storage has no room to save them meanwhile: {problem} Free "
                "space there, or pass TransferConfig(asynchronous=False) to save so without this warning.",
                stacklevel=2,
            )
        self._has_warned = True


def _nothing() -> None:
    pass
