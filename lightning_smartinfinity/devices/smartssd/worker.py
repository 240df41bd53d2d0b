"""One card at work: its part of a batch, and what is left of it when the card fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.cards import Card
from lightning_smartinfinity.devices.smartssd.unreturned import close_or_keep
from lightning_smartinfinity.native import UpdateStep

__all__ = ["CardWorker", "Terms", "Work"]

_log = logging.getLogger(__name__)

_MOST_FAILURES = 3
# Seconds. Linux resets an NVMe controller that has not answered for so long (nvme_core.io_timeout), and then repeats
# what it was asked: that a write returns later than this is not to be expected.
_RECOVERY = 30.0
_POLL = 0.01


class Terms(NamedTuple):
    """What the tasklets of a batch have in common.

    Args:
        steps: Which their segments count in.
        codec: That compresses their gradients; None: nothing does.
        residual_scale: Of the gradients.
    """

    steps: Sequence[UpdateStep]
    codec: native.GradientCodec | None
    residual_scale: float

    def batch(self, tasklets: Sequence[native.Tasklet]) -> native.Batch:
        """Of these tasklets."""
        return native.Batch(
            native.Operation.UPDATE, tasklets, self.steps, codec=self.codec, residual_scale=self.residual_scale
        )


class Work(NamedTuple):
    """A tasklet of a batch.

    Args:
        position: In the batch.
        tasklet: As the batch has it.
        terms: Of the batch.
    """

    position: int
    tasklet: native.Tasklet
    terms: Terms


class CardWorker:
    """A native pipeline over one card and the state file on its SSD.

    Args:
        card: The card.
        file: Index of its state file among the device's.
        pipeline: Of the card, with that one file.
    """

    def __init__(self, card: Card, file: int, pipeline: native.Pipeline) -> None:
        self.card = card
        self.file = file
        self.pipeline = pipeline
        self._work: list[Work] = []
        self._failure: native.Failure | None = None
        self._ending = False
        self._told_of_absence = False
        self._num_failures = 0  # of batches, one after another
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether it has a batch that has not been drained."""
        return bool(self._work)

    @property
    def ending(self) -> bool:
        """Whether :meth:`drain` was called, and not yet :meth:`forget`: an interrupt came between."""
        return self._ending

    @property
    def failure(self) -> str:
        """Of its batch, in words."""
        return self._failure.message if self._failure is not None else "an interrupt came before it could be told why"

    def takes(self, tasklet: native.Tasklet) -> bool:
        """Whether a tasklet's extents lie on its SSD."""
        return tasklet.read_file == tasklet.write_file == self.file

    def present(self) -> bool:
        """Whether it can be given work: not before all that was given up for its time has returned.

        Nor, after several failures in a row, at all.
        """
        if self._num_failures >= _MOST_FAILURES:
            return False
        busy = self.pipeline.busy
        if busy and not self._told_of_absence:
            _log.warning(
                "The %s is not used until all that was asked of it returns; the host updates for it.", self.card.label
            )
        elif self._told_of_absence and not busy:
            _log.warning("The %s has returned from all that was asked of it and is used again.", self.card.label)
        self._told_of_absence = busy
        return not busy

    def add(self, work: Sequence[Work]) -> None:
        """Start tasklets, behind those it has; return at once.

        Args:
            work: All of one batch.
        """
        batch = work[0].terms.batch([one.tasklet.in_file(0) for one in work])
        first = not self._work
        self._work += work
        if first:
            self.pipeline.submit(batch)
        else:
            self.pipeline.extend(batch)

    def positions(self, wanted: set[int] | None) -> list[int]:
        """Of these positions in the whole batch, or of all, those that it works, as it counts them."""
        return [index for index, one in enumerate(self._work) if wanted is None or one.position in wanted]

    def prefer(self, positions: Sequence[int]) -> None:
        """Begin these next, in this order.

        Args:
            positions: In the whole batch; those of others are passed over.
        """
        own = {one.position: index for index, one in enumerate(self._work)}
        mine = [own[position] for position in positions if position in own]
        if mine:
            self.pipeline.prefer(mine)

    def wait(self, wanted: set[int] | None) -> bool:
        """Until its tasklets among these positions have their parameters out.

        Returns:
            False: it failed.
        """
        own = self.positions(wanted)
        if own:
            self._failure = self.pipeline.wait_for(own) or self._failure
        return self._failure is None

    def drain(self) -> bool:
        """Until nothing is in flight.

        Returns:
            Whether all its work is on storage; if not, :meth:`undone` tells what is not. Until :meth:`forget` it says
            so again, though the pipeline tells of a failure once.
        """
        self._ending = True
        self._failure = self.pipeline.drain() or self._failure
        return not self.undone()

    def count_success(self) -> None:
        """The batch has not failed."""
        self._num_failures = 0

    def count_failure(self) -> None:
        """The batch has failed; after several in a row there is no other."""
        self._num_failures += 1
        if self._num_failures == _MOST_FAILURES:
            _log.warning(
                "The %s has failed %d times in a row and is not used any more in this training; the host updates for"
                " it. Look into the kernel log and run `smart-infinity selftest`; then begin again, or resume.",
                *(self.card.label, _MOST_FAILURES),
            )

    def undone(self) -> list[Work]:
        """After :meth:`drain`: what is not wholly on storage."""
        finished = set(self.pipeline.finished())
        return [one for index, one in enumerate(self._work) if index not in finished]

    def may_still_write(self, tasklets: Iterable[native.Tasklet]) -> str | None:
        """Of the places where these tasklets are to be written one that a write has not returned from; None: none.

        Such a write was given up for its time; whatever is written there meanwhile, it may overwrite.
        """
        ranges = self.pipeline.writes_out()
        for tasklet in tasklets:
            begin, end = tasklet.write_offset, tasklet.write_offset + tasklet.extent_bytes
            for offset, nbytes in ranges:
                if tasklet.write_file == self.file and offset < end and begin < offset + nbytes:
                    return f"{nbytes} bytes at offset {offset} (tasklet {tasklet.index})"
        return None

    def await_writes(self, tasklets: Sequence[native.Tasklet]) -> str | None:
        """As :meth:`may_still_write`, but only what has not returned after the time that an SSD takes to recover."""
        until = time.monotonic() + _RECOVERY
        while (late := self.may_still_write(tasklets)) is not None and time.monotonic() < until:
            time.sleep(_POLL)
        return late

    def forget(self) -> None:
        """The batch is over."""
        self._work = []
        self._failure, self._ending = None, False

    def abandon(self) -> None:
        """End the batch, when nothing of it is in flight."""
        if self._work:
            self.pipeline.abandon()
        self.forget()

    def close(self) -> None:
        """Release the card, now or when what is still out has returned; idempotent."""
        if not self._closed:
            self.abandon()
            self._closed = True
            close_or_keep(self.pipeline, self.card)
