"""Time limits for file-system calls whose disk does not answer.

The native core limits reads and writes of state; :func:`in_time` limits all other calls.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from typing import Generic, TypeVar

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.settings import IO_TIMEOUT
from lightning_smartinfinity.storage.io.exit import exit_beside

__all__ = [
    "DEVICES",
    "apart",
    "completed_requests",
    "counters_of",
    "doing_now",
    "in_time",
    "io_limit",
    "when_returned",
]

DEVICES = Path("/sys/dev/block")
"""Folder with one folder per block device or partition, named ``<major>:<minor>``."""

# Fields of the file "stat": completed reads, writes, discards and flushes. Older kernels have fewer.
_COMPLETED = (0, 4, 11, 15)


def counters_of(path: Path, *, devices: Path | None = None) -> Path | None:
    """Return the file with the request counters of a path's device. The path need not exist yet.

    Args:
        path: An absolute path. Looking up its device may block until the disk answers.
        devices: Folder of the devices, :data:`DEVICES` by default.

    Returns:
        The file, or None for file systems without their own device, such as tmpfs, overlay, btrfs and network ones.
    """
    for existing in (path, *path.parents):
        try:
            device = os.stat(existing).st_dev
        except OSError:
            continue
        counters = (devices or DEVICES) / f"{os.major(device)}:{os.minor(device)}" / "stat"
        return counters if completed_requests(counters) is not None else None
    return None


def completed_requests(counters: Path) -> int | None:
    """Return how many requests a device has completed, or None if unknown. Does not wait for the device."""
    try:
        fields = [int(field) for field in counters.read_text().split()]
    except (OSError, ValueError):
        return None
    return sum(fields[index] for index in _COMPLETED if index < len(fields)) if fields else None


T = TypeVar("T")

_POLL = 0.05
_UNSEEN = 10  # times the limit, where the system does not count requests: s3fs uploads to flush, and copies to rename
_BUSY = 40  # times the limit in all: the requests that the disk completes may be other processes'
_MOUNTS = Path("/proc/self/mounts")
_limit: ContextVar[float] = ContextVar("io_limit", default=IO_TIMEOUT)
_own = threading.local()  # has the attribute `call` in the thread of a call


class _Call(Generic[T]):
    """A call in its own thread. With ``renews``, its limit restarts whenever the disk has completed a request."""

    def __init__(
        self, function: Callable[[], T], *, doing: str, path: Path, renews: bool, undo: Callable[[T], object] | None
    ) -> None:
        self.function = function
        self._context = copy_context()  # io_limit, and the user's consent to load other types
        self.renews = renews
        self._undo = undo
        self._lock = threading.Lock()
        self._result: list[T] = []
        self._error: BaseException | None = None
        self._abandoned = False
        self.path = path
        self.began = time.monotonic()
        self.returned = threading.Event()
        self.num_steps = 0
        self.now = (doing, path)
        self.counters: Path | None = None  # request counters of the disk that it waits for
        self.asked = False  # whether `counters` has been looked up

    def make(self) -> None:
        try:
            _own.call = self
            self.step(*self.now)
            self.require_wanted()
            self._result.append(self._context.run(self.function))
        except BaseException as error:
            self._error = error
        with self._lock:  # either the waiting thread takes the result, or this one undoes it
            self.returned.set()
            late = self._abandoned
        if late:
            self.undo()

    def step(self, doing: str, path: Path) -> None:
        """Begin a step, which has the whole limit."""
        self.asked, self.counters, self.now = False, None, (doing, path)
        self.num_steps += 1
        if self.renews:
            self.counters = counters_of(path.absolute())
            self.asked = True

    def require_wanted(self) -> None:
        """Raise if the call was abandoned, so that it does nothing more."""
        if self._abandoned:
            raise StorageTimeoutError("The call was abandoned.", StorageTimeoutError.REMEDY)

    def abandon(self) -> bool:
        """Abandon the call unless it has returned; return whether it was abandoned. A later result is undone."""
        with self._lock:
            self._abandoned = not self.returned.is_set()
            return self._abandoned

    def undo(self) -> None:
        """Undo what the function did, if it has returned."""
        if self._undo is not None and self._result:
            with suppress(Exception):
                self._undo(self._result[0])

    def result(self) -> T:
        """Return what the function returned, or raise what it raised."""
        error, self._error = self._error, None
        if error is None:
            return self._result[0]
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and would keep the callers' objects alive


_abandoned: list[_Call[object]] = []
# Reentrant, because the garbage collector may close files in the thread that holds the lock.
_abandoned_lock = threading.RLock()
_num_before_fork = 0  # of native calls
_exit_handled = False


@contextmanager
def io_limit(seconds: float) -> Iterator[None]:
    """Set the default time limit of calls in this context, for example to ``TransferConfig.io_timeout``."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


@contextmanager
def doing_now(doing: str, path: str | Path) -> Iterator[None]:
    """Begin a step of this thread's call: its error names the step, and its limit restarts. No effect outside a call.

    Raises:
        StorageTimeoutError: The call was abandoned meanwhile and must do nothing more.
    """
    call: _Call[object] | None = getattr(_own, "call", None)
    if call is None:
        yield
        return
    before = call.now
    call.require_wanted()
    call.step(doing, Path(path))
    call.require_wanted()
    try:
        yield
    finally:
        call.step(*before)
    call.require_wanted()


def in_time(
    function: Callable[[], T],
    *,
    doing: str,
    path: Path,
    seconds: float | None = None,
    renews: bool = True,
    undo: Callable[[T], object] | None = None,
) -> T:
    """Call a function in another thread with a time limit, and return its result or raise its error.

    A call that is abandoned continues to the end of its current step (:func:`doing_now`). Until it returns, later calls
    for the same folder are refused. Time during which the process was stopped, for example by a debugger, does not
    count. An exception from a signal handler, such as that of Ctrl-C, is raised once the call has returned or was
    abandoned.

    With ``renews``, the limit restarts with each step, and whenever the disk completes a request. Where the system does
    not count completed requests, as for network file systems, each step has ten times the limit. The requests may be
    other processes', so a step has at most forty times the limit. Once the process was asked to end, the rest of the
    call has the limit itself.

    Args:
        function: The function. Nested calls are part of this call.
        doing: Its first action for the error message, such as ``"Flushing"``.
        path: The file or folder that it acts on.
        seconds: The limit, by default that of :func:`io_limit`; at most :func:`native.ending_seconds` once the process
            was asked to end.
        renews: Whether the limit restarts while the disk works, because flushing the page cache, allocating or deleting
            may take minutes; False for calls that do little work, such as writing a commit record.
        undo: Undoes the function's effects, given its result, if the result comes too late or an interrupt keeps it
            from the caller.

    Raises:
        StorageTimeoutError: The function did not return in time, or the disk does not answer.
    """
    call = _Call(function, doing=doing, path=path, renews=renews, undo=undo)
    if getattr(_own, "call", None) is not None:  # a nested call is a step of the outer one
        with doing_now(*call.now):
            return call.function()
    _refuse_behind(call.path)
    interrupt: BaseException | None = None
    try:
        # threading.Thread.start() would wait for ever for a thread that fails to begin for lack of memory.
        _thread.start_new_thread(call.make, ())
    except RuntimeError:  # no thread can be started, as when the interpreter ends
        return call.function()
    except BaseException as error:
        interrupt = error
    limit = _Limit(call, _limit.get() if seconds is None else seconds)
    while not call.returned.is_set() and limit.left > 0:
        try:
            call.returned.wait(limit.next_wait(interrupted=interrupt is not None))
        except BaseException as error:  # a signal handler may raise anything
            native.ask_to_end()
            interrupt = interrupt or error
    is_abandoned = call.abandon()
    if is_abandoned:
        with _abandoned_lock:
            _abandoned.append(call)  # type: ignore[arg-type]
        native.note_abandoned(limit.waited)
        atexit.unregister(_hasten)
        atexit.register(_hasten)  # runs before all handlers of now
        if _exit_handled:  # abandoned by a later exit handler, such as that of finalizers
            _exit_beside_unreturned()
    if interrupt is not None:
        if not is_abandoned:
            call.undo()
        try:
            raise interrupt
        finally:
            del interrupt  # as in result()
    if is_abandoned:
        doing, path = call.now
        raise StorageTimeoutError(f"{doing} {str(path)!r} did not return {limit}.", StorageTimeoutError.REMEDY)
    return call.result()


def when_returned(function: Callable[[], object], *, since: float) -> None:
    """Call a function once all calls that were abandoned have returned; at once if there are none.

    Use it to release what such a call may still use: a lock, or a descriptor whose number another file would get.

    Args:
        function: The function. If it has to wait, its errors do not reach the caller.
        since: Time at which the resource was acquired, by ``time.monotonic()``. Calls that began earlier cannot use it.
    """
    behind = [call.returned for call in _abandoned if call.began >= since and not call.returned.is_set()]
    if not behind:
        function()
        return

    def wait() -> None:
        for returned in behind:
            returned.wait()
        with suppress(OSError):
            function()

    _thread.start_new_thread(wait, ())


def apart(function: Callable[[], object]) -> None:
    """Call a function that may wait for a disk: in another thread while a call that was abandoned has not returned.

    Use it in finalizers: they run in any thread, at any time. Errors of the function do not reach the caller.
    """

    def call() -> None:
        with suppress(OSError):
            function()

    if not _unreturned():
        call()
        return
    with suppress(RuntimeError):  # no thread can be started: the process ends, and so does what is open
        _thread.start_new_thread(call, ())


def _unreturned() -> list[str]:
    """Describe the calls that were given up and have not returned, and count those of the native core."""
    calls = [f"{call.now[0]} {str(call.now[1])!r}" for call in list(_abandoned) if not call.returned.is_set()]
    requests = native.num_abandoned_calls() - _num_before_fork
    return calls + ([f"{requests} request{'s' * (requests > 1)} to drives or cards"] if requests > 0 else [])


def _hasten() -> None:
    """Make exit handlers and finalizers soon abandon what they wait for."""
    if _unreturned():
        native.ask_to_end()


@atexit.register
def _exit_beside_unreturned() -> None:
    global _exit_handled
    _exit_handled = True
    if calls := _unreturned():
        native.ask_to_end()
        exit_beside(calls)


def _forget_parent() -> None:
    """Forget, in a forked process, the calls of the threads that it does not have."""
    global _num_before_fork
    _abandoned.clear()
    _num_before_fork = native.num_abandoned_calls()


os.register_at_fork(after_in_child=_forget_parent)


class _Limit(Generic[T]):
    """The time left for a call, counted by its waits, because a clock goes on while the process is stopped."""

    def __init__(self, call: _Call[T], seconds: float) -> None:
        self._call = call
        self._seen: object = None
        self._step: object = None
        self._seconds = self._whole = self._idle = seconds
        self._in_all = seconds * _BUSY
        self._is_ending = False
        self.waited = 0.0

    @property
    def left(self) -> float:
        """Seconds left."""
        return min(self._idle, self._in_all)

    def next_wait(self, *, interrupted: bool) -> float:
        """Return how many seconds to wait next, and count them as waited."""
        ending = native.ending_seconds()
        if ending is not None and not self._is_ending:
            self._is_ending = True  # stays set if ending_seconds() is None again
            self._in_all = min(self._in_all, self._seconds)
        if self._call.renews and not interrupted:
            self._renew()
        if ending is not None:
            self._whole = min(self._whole, ending)
            self._idle = min(self._idle, self._whole)
        wait = min(_POLL, self.left)
        self._idle, self._in_all, self.waited = self._idle - _POLL, self._in_all - _POLL, self.waited + _POLL
        return wait

    def _renew(self) -> None:
        counters, step = self._call.counters, (self._call.num_steps, self._call.asked)
        if step != self._step and not self._is_ending:
            self._in_all = self._seconds * _BUSY
        state = step, counters and completed_requests(counters)
        if state != self._seen:
            unseen = self._call.asked and counters is None and not self._is_ending
            self._whole = self._idle = self._seconds * (_UNSEEN if unseen else 1)
        self._seen, self._step = state, step

    def __str__(self) -> str:
        return f"{'within' if self._call.counters is None else 'while its disk did nothing for'} {self._whole:g} s"


def _refuse_behind(path: Path) -> None:
    with _abandoned_lock:
        _abandoned[:] = [call for call in _abandoned if not call.returned.is_set()]
    if any(call.path.parent == path.parent and _mount_of(call.path) == _mount_of(path) for call in _abandoned):
        raise StorageTimeoutError(f"{str(path.parent)!r} has not answered an earlier call.", StorageTimeoutError.REMEDY)


def _mount_of(path: Path) -> Path | None:
    """Return the mount point of a path's file system, from the system's list of mounts: no disk is accessed."""
    names = (line.split()[1] for line in _MOUNTS.read_bytes().splitlines())
    mounts = {Path(os.fsdecode(name.decode("unicode_escape").encode("latin-1"))) for name in names}
    absolute = path.absolute()
    return next((folder for folder in (absolute, *absolute.parents) if folder in mounts), None)
