"""One card's part of a batch, and the tasklets that the card leaves unfinished if it fails."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.smartssd.discovery.cards import Card
from lightning_smartinfinity.devices.smartssd.unreturned import close_or_keep
from lightning_smartinfinity.native import UpdateStep

__all__ = ["CardWorker", "Terms", "Work"]

_log = logging.getLogger(__name__)

_MOST_FAILURES = 3
# Seconds. Linux resets an NVMe controller that has not answered for this long (nvme_core.io_timeout) and then repeats
# the request, so a write should not return later than this.
_RECOVERY = 30.0
_POLL = 0.01


class Terms(NamedTuple):
    """The settings that the tasklets of a batch share.

    Args:
        steps: Update steps, to which their segments refer by index.
        codec: Codec that compresses their gradients; ``None`` if they are not compressed.
        residual_scale: Factor of residuals when they are added to gradients.
    """

    steps: Sequence[UpdateStep]
    codec: native.GradientCodec | None
    residual_scale: float

    def batch(self, tasklets: Sequence[native.Tasklet]) -> native.Batch:
        """Make a batch of these tasklets."""
        return native.Batch(
            native.Operation.UPDATE, tasklets, self.steps, codec=self.codec, residual_scale=self.residual_scale
        )


class Work(NamedTuple):
    """A tasklet of a batch.

    Args:
        position: Position in the batch.
        tasklet: The tasklet, as in the batch.
        terms: Settings of the batch.
    """

    position: int
    tasklet: native.Tasklet
    terms: Terms


class CardWorker:
    """A native pipeline over one card and the state file on its SSD.

    Args:
        card: The card.
        file: Index of the card's state file among the device's files.
        pipeline: The card's pipeline, with only that file.
    """

    def __init__(self, card: Card, file: int, pipeline: native.Pipeline) -> None:
        self.card = card
        self.file = file
        self.pipeline = pipeline
        self._work: list[Work] = []
        self._failure: native.Failure | None = None
        self._ending = False
        self._warned = False
        self._num_failures = 0  # consecutive batches that failed
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether the worker has a batch that has not been finished."""
        return bool(self._work)

    @property
    def ending(self) -> bool:
        """Whether :meth:`finish` was called but :meth:`forget` was not, because an interrupt came in between."""
        return self._ending

    @property
    def failure(self) -> str:
        """Message of the batch's failure."""
        return self._failure.message if self._failure is not None else "an interrupt came before the reason was known"

    def holds(self, tasklet: native.Tasklet) -> bool:
        """Return whether a tasklet's extents are on the card's SSD."""
        return tasklet.read_file == tasklet.write_file == self.file

    def usable(self) -> bool:
        """Return whether the card can be given work.

        The answer is False until all abandoned calls have returned, and after several failures in a row.
        """
        if self._num_failures >= _MOST_FAILURES:
            return False
        busy = self.pipeline.busy
        if busy and not self._warned:
            _log.warning(
                "The %s is not used until all that was asked of it returns; the host updates for it.", self.card.label
            )
        elif self._warned and not busy:
            _log.warning("The %s has returned from all that was asked of it and is used again.", self.card.label)
        self._warned = busy
        return not busy

    def add(self, work: Sequence[Work]) -> None:
        """Start tasklets after those that the card already has; return at once.

        Args:
            work: Works of one batch.
        """
        batch = work[0].terms.batch([one.tasklet.in_file(0) for one in work])
        first = not self._work
        self._work += work
        if first:
            self.pipeline.submit(batch)
        else:
            self.pipeline.extend(batch)

    def positions(self, wanted: set[int] | None) -> list[int]:
        """Return the wanted positions (``None``: all) that the card processes, as positions in its own batch."""
        return [index for index, one in enumerate(self._work) if wanted is None or one.position in wanted]

    def prefer(self, positions: Sequence[int]) -> None:
        """Move these tasklets, in this order, before all others that have not started.

        Args:
            positions: Positions in the whole batch; those of other cards and the host are skipped.
        """
        own = {one.position: index for index, one in enumerate(self._work)}
        mine = [own[position] for position in positions if position in own]
        if mine:
            self.pipeline.prefer(mine)

    def wait(self, wanted: set[int] | None) -> bool:
        """Wait until the parameters of the card's tasklets among these positions are in memory.

        Returns:
            Whether no failure has occurred.
        """
        own = self.positions(wanted)
        if own:
            self._failure = self.pipeline.wait_for(own) or self._failure
        return self._failure is None

    def finish(self) -> bool:
        """Wait until no work is in progress.

        Returns:
            Whether all work is on storage; if not, :meth:`unfinished` lists the missing works. Until :meth:`forget`,
            the answer stays the same, although the pipeline reports a failure only once.
        """
        self._ending = True
        self._failure = self.pipeline.finish() or self._failure
        return not self.unfinished()

    def count_success(self) -> None:
        """Record that the batch has not failed."""
        self._num_failures = 0

    def count_failure(self) -> None:
        """Record that the batch has failed; after several failures in a row the card is no longer used."""
        self._num_failures += 1
        if self._num_failures == _MOST_FAILURES:
            _log.warning(
                "The %s has failed %d times in a row and is not used any more in this training; the host updates for"
                " it. Look into the kernel log and run `smart-infinity selftest`; then begin again, or resume.",
                *(self.card.label, _MOST_FAILURES),
            )

    def unfinished(self) -> list[Work]:
        """Return, after :meth:`finish`, the works that are not completely on storage."""
        finished = set(self.pipeline.finished())
        return [one for index, one in enumerate(self._work) if index not in finished]

    def may_still_write(self, tasklets: Iterable[native.Tasklet]) -> str | None:
        """Describe a destination of these tasklets with an unfinished write; ``None`` if there is none.

        That write was abandoned after a timeout, and may overwrite data written there in the meantime.
        """
        ranges = self.pipeline.writes_out()
        for tasklet in tasklets:
            begin, end = tasklet.write_offset, tasklet.write_offset + tasklet.extent_bytes
            for offset, nbytes in ranges:
                if tasklet.write_file == self.file and offset < end and begin < offset + nbytes:
                    return f"{nbytes} bytes at offset {offset} (tasklet {tasklet.index})"
        return None

    def await_writes(self, tasklets: Sequence[native.Tasklet]) -> str | None:
        """Wait until :meth:`may_still_write` finds no write, or an SSD has had time to recover; return its result."""
        until = time.monotonic() + _RECOVERY
        while (late := self.may_still_write(tasklets)) is not None and time.monotonic() < until:
            time.sleep(_POLL)
        return late

    def forget(self) -> None:
        """Clear the batch, which is over."""
        self._work = []
        self._failure, self._ending = None, False

    def stop(self) -> None:
        """End the batch, and wait until none of its work is in progress."""
        if self._work:
            self.pipeline.stop()
        self.forget()

    def close(self) -> None:
        """Release the card now, or once the calls in progress have returned; idempotent."""
        if not self._closed:
            self.stop()
            self._closed = True
            close_or_keep(self.pipeline, self.card)
