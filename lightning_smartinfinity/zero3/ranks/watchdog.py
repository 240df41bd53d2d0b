"""Watches the processes of the other ranks while this one trains or evaluates.

The watch itself is native (:class:`lightning_smartinfinity.native.RankWatch`), so it responds even while Python is
blocked. This module connects the ranks, and turns the watch's reports into errors.
"""

from __future__ import annotations

import hmac
import os
import platform
import secrets
import socket
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from typing import TypeVar

import torch.distributed as dist

from lightning_smartinfinity.common.last_error import last_error
from lightning_smartinfinity.errors import RankLostError, RanksDivergedError
from lightning_smartinfinity.native import RankNotice, RankWatch, ending_seconds
from lightning_smartinfinity.settings.user_calls import user_calls
from lightning_smartinfinity.zero3.ranks.locations import PlaceWatch, cut_connections, known_sockets, noting_waits

__all__ = [
    "agree_to_end",
    "awaiting_ranks",
    "begin_watch",
    "end_watch",
    "hear_sigterm",
    "is_asked_to_end",
    "is_ending",
    "is_watching",
    "naming_lost_rank",
    "note_batch",
    "saving",
    "lost_rank_behind",
    "tell_failure",
    "tell_sigterm",
]

T = TypeVar("T")

_GRACE = 15.0
"""Seconds that Python has to end a process with an error after a rank was lost."""
_PATIENCE = 45.0
"""Seconds for all ranks to end their training together after SIGTERM, or after an error on one of them.

After SIGTERM, the limit is twice the longest batch if that is longer, and a save in progress may finish.
"""
_MEETING = 20.0
"""Seconds for the ranks to connect, after all have exchanged addresses."""
_NOTICE = 3.0
"""Seconds to wait for the watch's report of the cause after a collective has failed."""
_TIMEOUT = "as long as the strategy's timeout=timedelta(minutes=5) says"
_TOKEN_BYTES, _RANK_BYTES = 16, 4


@dataclass(frozen=True)
class _Watch:
    native: RankWatch
    hosts: list[str]
    group: weakref.ref[dist.ProcessGroup]
    limits: tuple[float | None, float | None]
    places: PlaceWatch | None = None
    waits: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        if self.places is not None:
            self.places.close()
        self.waits.close()
        self.native.close()


_watch: _Watch | None = None
_num_begun = 0
_known_sockets: set[str] | None = None  # this process's sockets before the ranks met


@contextmanager
def awaiting_ranks() -> Iterator[None]:
    """Raise an error with a remedy if not all ranks join the process group; before that, there is no watch.

    Raises:
        RankLostError: Some ranks did not join in time.
    """
    global _known_sockets
    if not dist.is_initialized():
        _known_sockets = known_sockets()
    try:
        yield
    except (dist.DistStoreError, dist.DistNetworkError) as error:
        if "timed out" not in str(error).lower():
            raise
        raise RankLostError(
            f"Not all ranks have come together, as seen from {platform.node()}: {str(error).rstrip('.')}.",
            "Start the script on every machine, each with the same MASTER_ADDR and MASTER_PORT, which all must reach. "
            f"They wait for each other for 30 minutes, or {_TIMEOUT}.",
        ) from error


def begin_watch(silence: float | None, join_limit: float | None) -> int:
    """Watch the other ranks from now on, in a training or an evaluation. Collective.

    Args:
        silence: Seconds after which a rank that does not respond counts as lost; None or 0: no watch.
        join_limit: Seconds that a rank may take to join the others in a collective; None or 0: no limit.

    Returns:
        The number of this call, for :func:`end_watch`.

    Raises:
        RankLostError: A rank is lost already, or the ranks have diverged.
    """
    global _watch, _num_begun
    _num_begun += 1
    if dist.get_world_size() == 1:
        return _num_begun
    group = dist.group.WORLD
    limits = silence, join_limit
    if _watch is not None and (_watch.group() is not group or _watch.limits != limits):
        _watch.close()
        _watch = None
    if _watch is None and silence:
        _watch = _meet(silence, join_limit)
    if _watch is not None:
        _raise_if_lost()
        _watch.waits.close()
        if _watch.places is not None:
            _watch.waits.enter_context(noting_waits(lost_rank_behind))
            _watch.places.ended = False
        _watch.native.begin_training()
        hear_sigterm()
    return _num_begun


def end_watch(number: int) -> None:
    """End this rank's part in the watch, so that it may exit without counting as lost.

    Args:
        number: The result of :func:`begin_watch`. If that was called again since, the watch continues.
    """
    if _watch is not None and number == _num_begun:
        _watch.waits.close()
        if _watch.places is not None:
            _watch.places.ended = True
        _watch.native.end_training()


def _raise_if_lost() -> None:
    """Raise an error if another rank is lost.

    Raises:
        RankLostError: Another rank was killed or does not answer, or the ranks have diverged.
    """
    if _watch is None:
        return
    report = _watch.native.report()
    if report.diverged is not None:
        raise _diverged(report.diverged)
    if report.lost is not None:
        raise _error(_watch, report.lost)


def lost_rank_behind(error: BaseException) -> RankLostError | None:
    """Return an error that names the missing rank if ``error`` is a collective's; None if no rank is missing."""
    if _watch is None or not _is_of_collective(error):
        return None
    report = _watch.native.wait(_NOTICE)
    if report.diverged is not None:
        return _diverged(report.diverged)
    notice = report.lost or report.failed or (report.left and (report.asked or report.left))
    return None if notice is None else _error(_watch, notice)


@contextmanager
def naming_lost_rank() -> Iterator[None]:
    """Raise an error that names the missing rank, on entry or instead of a failed collective's error.

    Raises:
        RankLostError: Another rank is missing.
    """
    _raise_if_lost()  # a forward that gathers nothing would not notice the loss
    try:
        yield
    except Exception as error:
        if (lost := lost_rank_behind(error)) is None:
            raise
        raise lost from error


def tell_failure(error: BaseException) -> None:
    """Report to the other ranks, which may be waiting, that an error ends this rank's training."""
    if _watch is not None:
        line = str(error).partition("\n")[0]
        _watch.native.tell_failure(f"failed with {type(error).__name__}: {line}")


def hear_sigterm() -> None:
    """Install a handler that reports SIGTERM to the other ranks at once, and then calls the present handler."""
    if _watch is not None:
        _watch.native.hear_sigterm()


def is_watching() -> bool:
    """Return whether the other ranks are watched."""
    return _watch is not None


def tell_sigterm() -> None:
    """Report to the other ranks that this one received SIGTERM."""
    if _watch is not None:
        _watch.native.tell_sigterm()


def is_asked_to_end() -> bool:
    """Return whether any rank received SIGTERM, as far as this rank knows; rank 0 knows first."""
    return _watch is not None and _watch.native.report().asked is not None


def is_ending() -> bool:
    """Return whether this process was asked to end, or another rank has failed or is missing."""
    if _watch is None:
        return ending_seconds() is not None
    report = _watch.native.report()
    return any(notice is not None for notice in (report.asked, report.failed, report.lost, ending_seconds()))


def agree_to_end() -> None:
    """Give this rank unlimited time to end, after all ranks have agreed to end their training."""
    if _watch is not None:
        _watch.native.agree()


def note_batch() -> None:
    """Record the start of a batch, from which the time to end after SIGTERM counts anew; see :data:`_PATIENCE`."""
    if _watch is not None:
        _watch.native.note_batch()


@contextmanager
def saving() -> Iterator[None]:
    """Keep SIGTERM from ending this process within this context, in which a checkpoint is saved."""
    native = None if _watch is None else _watch.native
    if native is None:
        yield
        return
    native.begin_saving()
    try:
        yield
    finally:
        native.end_saving()


def _error(watch: _Watch, notice: RankNotice) -> RankLostError:
    return RankLostError(
        f"Rank {notice.rank} on {watch.hosts[notice.rank]} {notice.why}; rank {dist.get_rank()} cannot go on alone.",
        f"See that rank's output and the kernel log there. Resume with {user_calls().from_storage} or a checkpoint.",
    )


def _diverged(where: str) -> RanksDivergedError:
    return RanksDivergedError(
        where,
        "Give every rank the same number of batches (drop_last=True, limit_train_batches, max_steps), and run each "
        "forward, backward, GatheredParameters, generate(..., synced_gpus=True) and save on every rank, not one. If a "
        "rank's own work takes longer, pass a higher collective_timeout to the strategy.",
    )


def _end_waits() -> None:
    """End this process's waits in collectives, because the ranks have diverged."""
    if _known_sockets is not None:
        cut_connections(_known_sockets)


def _is_of_collective(error: BaseException) -> bool:
    # Gloo raises plain RuntimeErrors, which name one of its files.
    return isinstance(error, dist.DistError) or (type(error) is RuntimeError and "gloo" in str(error).lower())


# ---- how the ranks meet


def _meet(silence: float, join_limit: float | None) -> _Watch | None:
    """Connect all ranks with rank 0, and return this rank's watch; None, with a warning, if some cannot connect."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    listener: socket.socket | None = None
    problem, port = "", 0
    if rank == 0:
        # No rank may raise alone before the collective below.
        try:
            listener = _listen(world_size)
            port = listener.getsockname()[1]
        except OSError as error:
            problem = f"rank 0 cannot listen: {error}"
    offers = _gather((platform.node(), port, secrets.token_bytes(_TOKEN_BYTES)))
    hosts = [host for host, _, _ in offers]
    host, port, token = offers[0]
    address = os.environ.get("MASTER_ADDR", host)
    sockets: dict[int, socket.socket] = {}
    try:
        if rank != 0 and port != 0:
            sockets[0] = _connect(address, port, hello=token + rank.to_bytes(_RANK_BYTES, "big"))
        elif listener is not None:
            sockets = _accept(listener, world_size - 1, token)
    except OSError as error:
        problem = f"rank {rank} on {hosts[rank]}: {error}"
    problems = [found for found in _gather(problem) if found]
    if problems:
        if rank == 0:
            warnings.warn(
                f"No watch over the ranks, which cannot connect to port {port} of {address}: {problems[0]}. A rank that"
                " is killed or stopped will be noticed by torch's own timeout only: after 30 minutes, or "
                f"{_TIMEOUT} (TrainingArguments(ddp_timeout=300) with transformers).",
                stacklevel=2,
            )
        for connected in sockets.values():
            connected.close()
        return None
    native = RankWatch(
        rank=rank,
        hosts=hosts,
        sockets=[(peer, connected.detach()) for peer, connected in sockets.items()],
        silence=silence,
        grace=_GRACE,
        patience=_PATIENCE,
    )
    # Runs at interpreter exit, and also in a process of multiprocessing, which runs no atexit handlers.
    Finalize(None, _say_farewell, (native,), exitpriority=100)
    group = dist.group.WORLD
    assert group is not None
    places = PlaceWatch(native, hosts, join_limit, _end_waits) if join_limit else None
    if places is not None:
        places.start()
    return _Watch(native, hosts, weakref.ref(group), (silence, join_limit), places)


def _say_farewell(native: RankWatch) -> None:
    """End a watch at the end of the process; if an error ends the process, report it first."""
    error = last_error()
    if error is not None and _watch is not None and _watch.native is native:
        tell_failure(error)
    if _watch is not None and _watch.native is native:
        _watch.close()
    native.close()


def _gather(value: T) -> list[T]:
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]


def _listen(backlog: int) -> socket.socket:
    """Listen on the interface that the other ranks reach, or on all interfaces if that is unknown."""
    address = os.environ.get("MASTER_ADDR")
    for family, _, _, _, place in socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM) if address else []:
        with suppress(OSError):
            return socket.create_server((place[0], 0), family=family, backlog=backlog)
    dual = socket.has_dualstack_ipv6()
    return socket.create_server(
        ("", 0), family=socket.AF_INET6 if dual else socket.AF_INET, backlog=backlog, dualstack_ipv6=dual
    )


def _connect(address: str, port: int, *, hello: bytes) -> socket.socket:
    connected = socket.create_connection((address, port), timeout=_MEETING)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.sendall(hello)
    except OSError:
        connected.close()
        raise
    return connected


def _accept(listener: socket.socket, count: int, token: bytes) -> dict[int, socket.socket]:
    """Return a connection with each of the other ranks; close connections that do not send the token."""
    until = time.monotonic() + _MEETING
    sockets: dict[int, socket.socket] = {}
    with listener:
        while len(sockets) < count:
            listener.settimeout(max(until - time.monotonic(), 0.001))  # 0 would make it non-blocking
            connected, _ = listener.accept()
            connected.settimeout(1)
            hello = b""
            with suppress(OSError):
                hello = connected.recv(_TOKEN_BYTES + _RANK_BYTES, socket.MSG_WAITALL)
            rank = int.from_bytes(hello[_TOKEN_BYTES:], "big")
            if not hmac.compare_digest(hello[:_TOKEN_BYTES], token) or not 0 < rank <= count or rank in sockets:
                connected.close()
                continue
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sockets[rank] = connected
    return sockets
