"""SmartSSDs as a storage device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from typing import NoReturn

from lightning_smartinfinity import native
from lightning_smartinfinity.devices.base import FolderTraffic, StorageDevice, Traffic
from lightning_smartinfinity.devices.host import HostDevice
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.devices.smartssd.kernels import Kernel
from lightning_smartinfinity.devices.smartssd.opening import card_errors, open_card
from lightning_smartinfinity.devices.smartssd.ring import CardRing, gradient_file_bytes, ring_within, share_of_memory
from lightning_smartinfinity.devices.smartssd.unreturned import close_returned, when_written
from lightning_smartinfinity.devices.smartssd.worker import CardWorker, Terms, Work
from lightning_smartinfinity.errors import DeviceError, SmartInfinityError
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.io.os_errors import in_milliseconds, storage_errors

__all__ = ["SmartSSDDevice"]

_log = logging.getLogger(__name__)

_HOST_BUFFERS = 2  # the host reads and writes outside of steps, and updates tasklets that a card leaves unfinished
_MOST_IO_THREADS = 64  # one for each buffer: with fewer, earlier reads delay writes that could run concurrently
_WRITING = (native.Operation.UPDATE, native.Operation.WRITE, native.Operation.MODIFY)
_COMPUTE_THREADS = 2  # while one waits for a card's run, the other fetches the parameters of another run


class SmartSSDDevice(StorageDevice):
    """Updates on the SSDs' cards: gradients are sent to the cards, parameters are sent back, state stays there.

    A host device over the same files runs everything else: other operations, and tasklets that a card leaves
    unfinished.

    Args:
        setup: The cards, one for each storage folder.
        kernel: The optimizer's kernel.
        ring: Buffers in each card's memory.
        compute_threads: Number of threads that update on the host.
        io_engine: The I/O engine of the host.
        io_timeout: Seconds after which a read or write of the host is abandoned.
    """

    def __init__(
        self,
        setup: CardSetup,
        *,
        kernel: Kernel,
        ring: CardRing,
        compute_threads: int = 1,
        io_engine: str = "auto",
        io_timeout: float = IO_TIMEOUT,
    ) -> None:
        self._setup = setup
        self._kernel = kernel
        self._ring = ring
        self._host = HostDevice(
            num_buffers=_HOST_BUFFERS, compute_threads=compute_threads, io_engine=io_engine, io_timeout=io_timeout
        )
        self._resources = ExitStack()
        self._workers: list[CardWorker] = []
        self._num_files = 0
        self._num_works = 0
        # The part of the batch that the host processes, in the host's order; None means the whole batch.
        self._on_host: list[Work] | None = []
        self._host_active = False
        self._host_has_all = True  # False while works are handed to the host; an interrupt leaves it False
        self._error: DeviceError | None = None

    @property
    def moves_tasklets(self) -> bool:
        return False

    @property
    def updates_from_parameters(self) -> bool:
        return False

    @property
    def description(self) -> str:
        cards = ", ".join(worker.card.label for worker in self._workers)
        return (
            f"Optimizer state: updated on SmartSSD ({cards}; {self._kernel.name}, gradients by way of {self._route},"
            f" XRT by {self._setup.binding}), {self._workers[0].pipeline.io_engine} for P2P."
        )

    @property
    def _route(self) -> str:
        return "storage" if self._setup.settings.gradient_route == "storage" else "host"

    @property
    def ring_bytes(self) -> int:
        return self._host.ring_bytes + sum(worker.pipeline.ring_bytes for worker in self._workers)

    @property
    def cache_bytes(self) -> int:
        return 0

    def open(
        self,
        *,
        files: Sequence[native.StateFile],
        identity: native.Identity,
        buffer_bytes: int,
        resident_bytes: Sequence[int] = (),
        written_through: bool = True,
    ) -> None:
        assert not resident_bytes, "a card's state does not stay in host memory"
        assert len(files) == len(self._setup.cards), "one card for each storage folder"
        self._num_files, self._workers = len(files), []
        close_returned()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._host.open(files=files, identity=identity, buffer_bytes=buffer_bytes)
            for index, file in enumerate(files):
                self._workers.append(self._open_worker(index, file, identity, buffer_bytes))
            undo.pop_all()

    def _open_worker(
        self, index: int, file: native.StateFile, identity: native.Identity, buffer_bytes: int
    ) -> CardWorker:
        card = self._setup.cards[index]
        if not file.direct:
            raise DeviceError(
                f"{file.path!r} is open through the page cache, which the {card.label} cannot reach.",
                "Use TransferConfig(direct_io='on') on a file system that has direct I/O.",
            )
        ring = ring_within(self._setup, self._ring, extent_bytes=buffer_bytes)
        needed = gradient_file_bytes(self._setup, ring)
        gradients = open_gradient_file(Path(file.path).parent, needed, self._resources) if needed else None
        opened = open_card(self._setup, card)
        self._resources.callback(opened.close)
        with card_errors(card), storage_errors("Allocating buffers for", file.path):
            pipeline = native.Pipeline(
                files=[file],
                identity=identity,
                num_buffers=ring.num_buffers,
                buffer_bytes=buffer_bytes,
                io_threads=min(ring.num_buffers, _MOST_IO_THREADS),
                compute_threads=_COMPUTE_THREADS,
                card=native.CardOptions(
                    card=opened,
                    kernel=self._kernel.name,
                    gradient_buffer_bytes=ring.gradient_buffer_bytes,
                    parameter_bytes=ring.parameter_bytes,
                    timeout_ms=in_milliseconds(self._setup.settings.timeout),
                    dram_bytes=share_of_memory(self._setup),
                    gradient_file=gradients,
                ),
            )
        return CardWorker(card, index, pipeline)

    # ---- batches

    def submit(self, batch: native.Batch) -> None:
        self._on_host, self._num_works, self._error, self._host_has_all = [], 0, None, True
        if batch.operation in _WRITING:
            self._require_no_late_write(batch.tasklets)
        if batch.operation is native.Operation.UPDATE:
            self._distribute(batch)
        else:
            self._on_host = None
            self._host_active = True
            self._host.submit(batch)

    def extend(self, more: native.Batch) -> None:
        self._resume()
        if more.operation in _WRITING:
            self._require_no_late_write(more.tasklets)
        if self._on_host is not None:
            self._distribute(more)
        else:
            self._host.extend(more)

    def _require_no_late_write(self, tasklets: Sequence[native.Tasklet]) -> None:
        """Raise if an abandoned write may still reach a place to which one of these tasklets will write.

        Raises:
            DeviceError: There is such a write; no work has been started.
        """
        for worker in self._workers:
            late = worker.may_still_write(tasklets)
            if late is not None:
                raise _unfinished_write(worker, late)

    def _distribute(self, batch: native.Batch) -> None:
        for point in batch.ready:
            point.synchronize()  # gradients are sent to a card at once, but copies to the host may still be in flight
        terms = Terms(batch.steps, batch.codec, batch.residual_scale)
        works = [Work(self._num_works + number, tasklet, terms) for number, tasklet in enumerate(batch.tasklets)]
        self._num_works += len(works)
        left = works
        for worker in self._workers:
            mine = [work for work in left if worker.holds(work.tasklet)]
            if mine and (worker.active or worker.usable()):
                worker.add(mine)
                left = [work for work in left if not worker.holds(work.tasklet)]
        self._give_host(left)

    def _give_host(self, works: Sequence[Work]) -> None:
        """Hand these works, and those that an interrupt kept back, to the host; skip works that it already has."""
        assert self._on_host is not None
        has_all, self._host_has_all = self._host_has_all, False
        if has_all:
            given = {work.position for work in self._on_host}
            batches = _by_batch([work for work in works if work.position not in given])
            self._on_host = [*self._on_host, *chain(*batches)]
        else:
            # An interrupt may have come before or after any call. Only a fresh start hands over each work exactly once.
            self._host.stop()
            self._host_active = False
            batches = _by_batch(list({work.position: work for work in [*self._on_host, *works]}.values()))
            self._on_host = list(chain(*batches))
        for batch in batches:
            submit = self._host.extend if self._host_active else self._host.submit
            self._host_active = True
            submit(batch[0].terms.batch([work.tasklet for work in batch]))
        self._host_has_all = True

    def prefer(self, positions: Sequence[int]) -> None:
        for worker in self._workers:
            worker.prefer(positions)
        own = self._host_positions(positions)
        if own:
            self._host.prefer(own)

    def wait(self, positions: Sequence[int] | None = None) -> None:
        self._resume()
        if self._error is not None:
            raise self._error
        if positions is not None:
            # Reorder on every card before waiting for the first.
            self.prefer(positions)
        wanted = None if positions is None else set(positions)
        for worker in self._workers:
            if worker.active and not worker.wait(wanted):
                self._end(worker)
        own = self._host_positions(positions)
        if self._host_active and (positions is None or own):
            self._host.wait(own if positions is not None else None)

    def _host_positions(self, positions: Sequence[int] | None) -> list[int]:
        """Return the positions that the host processes, converted to positions in the host's own batch."""
        if positions is None or not self._host_active:
            return []
        if self._on_host is None:
            return list(positions)
        own = {work.position: index for index, work in enumerate(self._on_host)}
        return [own[position] for position in positions if position in own]

    def finish(self) -> None:
        self._resume()
        for worker in self._workers:
            if worker.active:
                with suppress(DeviceError):  # self._error holds it and is raised below
                    self._end(worker)
        self._finish_host()
        if self._error is not None:
            raise self._error

    def _finish_host(self) -> None:
        if self._host_active:
            try:
                self._host.finish()
            except SmartInfinityError:
                self._host_active = False
                raise
            # An interrupt skips this line, because the host is then still at work.
            self._host_active = False

    def _resume(self) -> None:
        """Complete the calls that an interrupt of :meth:`wait` or :meth:`finish` cut short."""
        for worker in self._workers:
            if worker.ending:
                with suppress(DeviceError):  # self._error holds it; wait() and finish() raise it
                    self._end(worker)
        if not self._host_has_all:
            self._give_host([])

    def _end(self, worker: CardWorker) -> None:
        """Wait for a card, and give its unfinished tasklets to the host, which starts from their untouched places.

        The worker keeps its part of the batch until then, so that this call can be repeated after an interrupt.

        Raises:
            DeviceError: A tasklet has only one place, which the card may have overwritten, or the card may still write
                to its other place; :meth:`finish` must follow.
        """
        if worker.finish():
            worker.count_success()
        else:
            self._take_over(worker, worker.unfinished())
            worker.count_failure()
        worker.forget()

    def _take_over(self, worker: CardWorker, unfinished: Sequence[Work]) -> None:
        if any(_in_place(work.tasklet) for work in unfinished):
            error = DeviceError(
                f"The {worker.card.label} failed: {worker.failure}. It may have overwritten the state.",
                "Resume from a checkpoint, and use TransferConfig(durability='step') to survive such a failure.",
            )
            self._fail(worker, error)
        late = worker.await_writes([work.tasklet for work in unfinished])
        if late is not None:
            self._fail(worker, _unfinished_write(worker, late))
        _log.warning(
            "The %s failed: %s. The host updates its %d unfinished tasklets.",
            *(worker.card.label, worker.failure, len(unfinished)),
        )
        self._give_host(unfinished)

    def _fail(self, worker: CardWorker, error: DeviceError) -> NoReturn:
        """Mark the batch as failed permanently, and raise."""
        self._error = error
        worker.count_failure()
        worker.forget()
        raise error

    def stop(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._host.stop()
        self._host_active, self._host_has_all = False, True

    def counters(self) -> Traffic:
        total = self._host.counters()
        for worker in self._workers:
            total = total + _traffic_of(worker.pipeline.counters(), worker.file, self._num_files)
        return total

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._host.close()
        self._resources.close()

    def when_written(self, then: Callable[[], object]) -> None:
        when_written([worker.pipeline for worker in self._workers], then)


def _unfinished_write(worker: CardWorker, late: str) -> DeviceError:
    return DeviceError(
        f"The {worker.card.label} has not returned from writing {late} to its SSD: it may still overwrite"
        " whatever is written there instead.",
        "The state of the step before is whole, in other places. Look into the kernel log for the SSD; when it answers"
        " again, go on or resume. If it does not, end this process and restart the machine before resuming.",
    )


def _in_place(tasklet: native.Tasklet) -> bool:
    return (tasklet.read_file, tasklet.read_offset) == (tasklet.write_file, tasklet.write_offset)


def _by_batch(works: Sequence[Work]) -> list[list[Work]]:
    """Group the works by their batch."""
    batches: dict[int, list[Work]] = {}
    for work in works:
        batches.setdefault(id(work.terms), []).append(work)
    return list(batches.values())


def _traffic_of(counters: native.Counters, file: int, num_files: int) -> Traffic:
    """Convert the counters of a card's pipeline; its folder, at index ``file``, includes the gradient file."""
    (moved,) = counters.files
    folder = FolderTraffic(
        read_bytes=moved.read_bytes + counters.gradient_file_bytes,
        write_bytes=moved.written_bytes + counters.gradient_file_bytes,
        busy_seconds=moved.busy_seconds,
    )
    return Traffic.of(
        counters,
        storage_write_bytes=folder.write_bytes,
        folders=tuple(folder if index == file else FolderTraffic() for index in range(num_files)),
    )
