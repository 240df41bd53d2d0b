"""Sends tasklets through a bounded host buffer, in a thread that runs during the training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread

import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError, StorageError
from lightning_smartinfinity.pipeline.layout.batches import Piece, pieces_within
from lightning_smartinfinity.pipeline.parameters.staging_buffer import StagingBuffer
from lightning_smartinfinity.pipeline.parameters.submissions import Assignment, Direction, DirectSubmission, Submission

__all__ = ["StagedMemory", "StagedSubmission"]

_PATIENCE = 1.0  # seconds between checks that the answering thread is still alive


class StagedMemory(ABC):
    """Parameters that only their owner can reach.

    One thread, other than the training's, calls all of these methods.

    Attributes:
        dtype: The parameters' dtype.
    """

    dtype: native.DType

    @abstractmethod
    def put(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying ``values``, which may change on return, to elements from ``offset`` on of a sub-group."""

    @abstractmethod
    def get(self, sub_group: int, offset: int, values: torch.Tensor) -> None:
        """Start copying these elements of a sub-group into ``values``, which is filled after :meth:`synchronize`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until every copy started so far has completed."""


class _Rows:
    """The parameters of the tasklets in the staging buffer's rows.

    It is a :class:`~lightning_smartinfinity.pipeline.layout.batches.Memory`.

    Args:
        assignment: The work.
        partition: The parameters' partition.
        staging: The buffer.
    """

    def __init__(self, assignment: Assignment, partition: StagedMemory, staging: StagingBuffer) -> None:
        self.dtype = staging.dtype
        self.stream = None
        self.keeps_parameters = False
        self.num_rows = staging.num_rows
        self._layout = assignment.layout
        self._pieces = assignment.pieces
        self._partition = partition
        self._staging = staging
        self._free = list(range(staging.num_rows))
        self._row_of: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Number of rows that hold no tasklet."""
        return len(self._free)

    def take(self, tasklets: Sequence[int]) -> None:
        """Give each of these tasklets a free row."""
        self._row_of |= {tasklet: self._free.pop() for tasklet in tasklets}

    def free(self, tasklet: int) -> None:
        """Release the tasklet's row."""
        self._free.append(self._row_of.pop(tasklet))

    def put(self, tasklet: int) -> None:
        """Start copying the tasklet's updated parameters to the partition."""
        for piece in pieces_within(self._pieces(), [tasklet]):
            if piece.key >= 0:
                self._partition.put(piece.sub_group, self._offset(piece), self._values(piece))

    def get(self, tasklet: int) -> None:
        """Start copying the tasklet's parameters from the partition."""
        for piece in pieces_within(self._pieces(), [tasklet]):
            self._partition.get(piece.sub_group, self._offset(piece), self._values(piece))

    def address(self, piece: Piece) -> int:
        return self._values(piece).data_ptr()

    def _offset(self, piece: Piece) -> int:
        return piece.begin - self._layout.sub_groups[piece.sub_group].offset

    def _values(self, piece: Piece) -> torch.Tensor:
        begin = piece.begin - piece.tasklet * self._layout.extents.tasklet_numel
        return self._staging.row(self._row_of[piece.tasklet])[begin : begin + piece.end - piece.begin]


class StagedSubmission(Submission):
    """Sends tasklets through the rows of the staging buffer, in a thread of its own.

    Only this thread uses the device and the partition. It receives messages through a queue; a caller that needs an
    answer waits for a lock that the thread releases. Each question has its own lock, so Ctrl-C during a wait leaves no
    lock held: the next wait continues.

    Args:
        assignment: The work.
        partition: The parameters' partition.
        staging: The buffer.
    """

    def __init__(self, assignment: Assignment, partition: StagedMemory, staging: StagingBuffer) -> None:
        self._tasklets = assignment.tasklets
        self._mover = _Mover(assignment, partition, staging)

    def start(self) -> None:
        if self._tasklets:
            self.extend(self._tasklets)

    def extend(self, tasklets: Sequence[int]) -> None:
        self._mover.inbox.put(_Extend(list(tasklets)))
        self._mover.begin()

    def prefer(self, tasklets: Sequence[int]) -> None:
        self._mover.inbox.put(_Prefer(list(tasklets)))

    def wait(self, tasklets: Sequence[int]) -> None:
        self._mover.ask(_Wait(set(tasklets)))

    def finish(self) -> None:
        self._mover.ask(_Finish())

    def stop(self) -> None:
        self._mover.stop()


class _Extend:
    """Message: process these tasklets after the others."""

    def __init__(self, tasklets: list[int]) -> None:
        self.tasklets = tasklets


class _Prefer(_Extend):
    """Message: process these tasklets, in this order, before all others that have not started."""


class _Question:
    """Message that the thread answers."""

    def __init__(self) -> None:
        self._unanswered = Lock()
        self._unanswered.acquire()

    def answer(self) -> None:
        """Wake the caller that waits for the answer."""
        self._unanswered.release()

    def is_answered(self) -> bool:
        """Wait up to ``_PATIENCE`` seconds for an answer, and return whether it has arrived."""
        return self._unanswered.acquire(timeout=_PATIENCE)


class _Wait(_Question):
    """Question answered once the parameters of these tasklets are in the partition."""

    def __init__(self, tasklets: set[int]) -> None:
        super().__init__()
        self.tasklets = tasklets


class _Finish(_Question):
    """Asks the thread to end once all work is done."""


class _Stop(_Question):
    """Asks the thread to end now."""


_Message = _Extend | _Prefer | _Wait | _Finish | _Stop


class _Mover:
    """Does the work of a :class:`StagedSubmission` in a thread; it has the same arguments.

    Attributes:
        inbox: The messages to the thread.
    """

    def __init__(self, assignment: Assignment, partition: StagedMemory, staging: StagingBuffer) -> None:
        self._thread = Thread(target=self._run, name="smart-infinity-staging", daemon=True)
        self.inbox: SimpleQueue[_Message] = SimpleQueue()
        self._partition = partition
        self._rows = _Rows(assignment, partition, staging)
        self._loads = assignment.direction is Direction.FROM_PARTITION
        self._device = DirectSubmission(assignment.device, partial(assignment.make_batch, self._rows), [])
        self._waiting: deque[int] = deque()  # tasklets that have no row yet
        self._started: dict[int, None] = {}  # tasklets in progress on the device, in order
        self._copied: set[int] = set()  # tasklets whose copies to the partition have started
        self._questions: list[_Wait] = []
        self._ends: list[_Finish | _Stop] = []
        self._failure: SmartInfinityError | None = None
        self._stopping = False
        self._over = False

    # ---- called by the training's thread

    def begin(self) -> None:
        """Start the thread unless it was started before or :meth:`stop` was called.

        Raises:
            StorageError: No thread can be started.
        """
        if self._thread.ident is not None or self._stopping:
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            raise StorageError(
                f"A thread that moves parameters could not be started: {error}.", "Allow more threads (ulimit -u)."
            ) from error

    def ask(self, question: _Wait | _Finish) -> None:
        """Send a question and wait for its answer.

        Raises:
            SmartInfinityError: The work has failed.
        """
        self._ask(question)
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Wait until the thread has stopped, and prevent a later start."""
        self._stopping = True  # a thread whose start was interrupted may begin later
        self._ask(_Stop())

    def _ask(self, question: _Wait | _Finish | _Stop) -> None:
        if self._thread.ident is None:
            return
        self.inbox.put(question)
        # Check _over only after put(): once the thread is over, it may leave the question unread.
        while not self._over and not question.is_answered() and self._thread.is_alive():
            pass

    # ---- called by the thread

    def _run(self) -> None:
        # If the thread starts after stop(), other users may have the device and the partition.
        is_late = self._stopping
        while not self._over and not self._stopping:
            try:
                self._turn()
            except BaseException as error:  # the next ask() raises it
                self._fail(error)
        if not self._over and not is_late:
            self._halt()
        self._over = True
        self._answer_all()
        while not self.inbox.empty():
            message = self.inbox.get()
            if isinstance(message, _Question):
                message.answer()

    def _turn(self) -> None:
        idle = not self._started and not self._waiting
        while idle or not self.inbox.empty():
            self._take(self.inbox.get())
            idle = False
        if self._failure is not None or self._stopping:
            return
        if self._waiting and self._has_rows():
            self._submit()
        elif self._started and not self._can_answer():
            self._collect()
        self._settle()

    def _take(self, message: _Message) -> None:
        if isinstance(message, _Stop):
            self._ends.append(message)  # it is answered when the device has stopped
        elif self._failure is not None:
            if isinstance(message, _Question):
                message.answer()
        elif isinstance(message, _Prefer):
            self._prefer(message.tasklets)
        elif isinstance(message, _Extend):
            self._waiting.extend(message.tasklets)
        elif isinstance(message, _Wait):
            self._questions.append(message)  # first, so that it is answered if the rest fails
            message.tasklets &= {*self._waiting, *self._started, *self._copied}
            self._prefer([tasklet for tasklet in self._waiting if tasklet in message.tasklets])
        else:
            self._ends.append(message)

    def _prefer(self, tasklets: Sequence[int]) -> None:
        waiting, preferred = set(self._waiting), set(tasklets)
        first = [tasklet for tasklet in tasklets if tasklet in waiting]
        self._waiting = deque([*first, *(tasklet for tasklet in self._waiting if tasklet not in preferred)])
        if self._started:
            self._device.prefer([tasklet for tasklet in tasklets if tasklet in self._started])

    def _has_rows(self) -> bool:
        """Return whether enough rows are free to submit now: half of them, so that tasklets are submitted in groups.

        When loading, or if a caller waits for the next tasklet, one free row is enough.
        """
        if self._loads or self._is_asked_for(self._waiting[0]):
            return self._rows.num_free > 0
        return 2 * self._rows.num_free >= self._rows.num_rows

    def _submit(self) -> None:
        count = 1 if self._loads else min(self._rows.num_free, len(self._waiting))
        tasklets = [self._waiting.popleft() for _ in range(count)]
        self._rows.take(tasklets)
        if self._loads:
            self._rows.get(tasklets[0])
            self._partition.synchronize()  # the device may read the row as soon as it has the tasklet
        self._started |= dict.fromkeys(tasklets)
        self._device.extend(tasklets)

    def _collect(self) -> None:
        tasklet = next(filter(self._is_asked_for, self._started), next(iter(self._started)))
        self._device.wait([tasklet])
        if not self._loads:
            self._rows.put(tasklet)
        self._rows.free(tasklet)
        del self._started[tasklet]
        self._copied.add(tasklet)

    def _is_asked_for(self, tasklet: int) -> bool:
        return any(tasklet in question.tasklets for question in self._questions)

    def _can_answer(self) -> bool:
        """Return whether all tasklets of some question have started their copies to the partition."""
        return any(question.tasklets <= self._copied for question in self._questions)

    def _settle(self) -> None:
        """Answer questions whose parameters are in the partition, and end if asked to and no work is left."""
        is_done = not self._started and not self._waiting
        asked = (question.tasklets for question in self._questions)
        # Synchronize only when an answer or the end needs it, so that copies overlap with the device's work.
        if self._copied and (is_done or any(tasklets and tasklets <= self._copied for tasklets in asked)):
            self._partition.synchronize()
            for question in self._questions:
                question.tasklets -= self._copied
            self._copied.clear()
        for question in [question for question in self._questions if not question.tasklets]:
            self._questions.remove(question)
            question.answer()
        if is_done and self._ends:
            self._device.finish()
            self._over = True

    def _fail(self, error: BaseException) -> None:
        self._failure = error if isinstance(error, SmartInfinityError) else _unexpected(error)
        self._waiting.clear()
        self._started.clear()
        self._copied.clear()
        self._device.stop()
        self._answer_all()

    def _halt(self) -> None:
        self._device.stop()
        with suppress(SmartInfinityError):  # the caller has the error already, or does not need the result
            self._partition.synchronize()

    def _answer_all(self) -> None:
        for question in (*self._questions, *self._ends):
            question.answer()
        self._questions, self._ends = [], []


def _unexpected(error: BaseException) -> StorageError:
    """Wrap any other exception in a StorageError, so that the step is rolled back as after an expected failure."""
    failure = StorageError(
        f"Updated parameters could not be moved: {str(error) or type(error).__name__}.",
        "If memory was short, use less of it. The step before is whole.",
    )
    failure.__cause__ = error
    return failure
