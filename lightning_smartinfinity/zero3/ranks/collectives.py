"""Agreements between ranks: either all continue, or all raise."""

from __future__ import annotations

import platform
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_smartinfinity.common.progress import Advance, showing_progress
from lightning_smartinfinity.errors import RankLostError, SmartInfinityError, UnsupportedError

__all__ = [
    "agree_to_gather",
    "all_come",
    "background_group",
    "broadcast_buffers",
    "ending_group",
    "failing_together",
    "gather",
    "has_ended",
    "raise_together",
    "raising_together",
    "reading_group",
    "show_on_rank_zero",
    "sum_over_ranks",
    "sums_over_ranks",
    "writing_group",
]

T = TypeVar("T")


def gather(value: T, group: ProcessGroup | None) -> list[T]:
    """Return the values of all ranks, in rank order, on every rank."""
    values: list[T | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return cast("list[T]", values)


def broadcast_buffers(module: torch.nn.Module, group: ProcessGroup | None, *, device: torch.device) -> None:
    """Broadcast the first rank's values of a module's buffers to all ranks, as torch's DDP does.

    Args:
        module: The module.
        group: Process group of the ranks.
        device: Device that the group's backend sends from.
    """
    if dist.get_world_size(group) == 1:
        return
    first = 0 if group is None else dist.get_global_rank(group, 0)
    for buffer in module.buffers():
        if buffer.is_meta or buffer.layout is not torch.strided or not buffer.numel():
            continue
        sent = buffer.detach().to(device).resolve_conj().contiguous()
        # As bytes, because backends do not support every dtype, such as complex ones.
        dist.broadcast(sent.view(-1).view(torch.uint8), first, group)
        if dist.get_rank() != first:
            buffer.data = sent.to(buffer.device)


_BACKGROUND_LIMIT = timedelta(days=7)  # long, because the watch detects lost ranks
_ENDING_LIMIT = timedelta(seconds=5)  # ranks that fail together do so within much less
_groups: dict[str, tuple[weakref.ref[ProcessGroup], ProcessGroup]] = {}


def background_group() -> ProcessGroup:
    """Return the group of all ranks for collectives of their background threads; collective on the first call.

    Two threads that use the same group at the same time would receive each other's messages.
    """
    return _group_for("background", timeout=_BACKGROUND_LIMIT)


def reading_group() -> ProcessGroup:
    """Return the group of all ranks for :func:`agree_to_gather`; collective on the first call."""
    return _group_for("reads", timeout=None)


def ending_group() -> ProcessGroup:
    """Return the group of all ranks for :func:`all_come`; collective on the first call."""
    return _group_for("ending", timeout=_ENDING_LIMIT)


def writing_group() -> ProcessGroup:
    """Return another group for :func:`all_come`, of ranks that write state; collective on the first call."""
    return _group_for("writing", timeout=_ENDING_LIMIT)


def all_come(number: int, group: ProcessGroup) -> bool:
    """Return whether all ranks call this within some seconds, with the same number.

    Args:
        number: The number.
        group: The result of :func:`ending_group` or :func:`writing_group`. After False it cannot be used again.
    """
    met = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    try:
        dist.all_gather_into_tensor(met, torch.tensor([number]), group=group)
    except (RuntimeError, ValueError, RankLostError):  # ValueError: the group was destroyed
        return False
    return bool((met == number).all())


def _group_for(purpose: str, *, timeout: timedelta | None) -> ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    made = _groups.get(purpose)
    if made is None or made[0]() is not world:
        made = _groups[purpose] = weakref.ref(world), dist.new_group(backend="gloo", timeout=timeout)
    return made[1]


def agree_to_gather(numbers: Sequence[int], describe: Callable[[], tuple[list[str], str]]) -> None:
    """Check that all ranks are about to gather the same parameters outside of forward and backward. Collective.

    Without this check, a gather on one rank could be matched with a different gather on another rank, and fill
    parameters with wrong values. The check uses its own group, :func:`reading_group`. If a rank does not call this, all
    raise :class:`RanksDivergedError`, as in any collective.

    Args:
        numbers: Numbers of the parameters (``ds_id``), in order.
        describe: Function that returns the names of the parameters, and the line of code that reads them.

    Raises:
        UnsupportedError: Another rank is about to gather other parameters.
    """
    group = reading_group()
    digest = zlib.crc32(repr(list(numbers)).encode())
    met = torch.empty(dist.get_world_size(group), dtype=torch.int64)
    dist.all_gather_into_tensor(met, torch.tensor([digest]), group=group)
    if bool((met == digest).all()):
        return
    described = gather(describe(), group)
    rank = next(rank for rank, value in enumerate(met.tolist()) if value != met[0])
    (names, place), (first, first_place) = described[rank], described[0]
    raise UnsupportedError(
        f"Rank {rank} reads {', '.join(map(repr, names))} at {place}, and rank 0 {', '.join(map(repr, first))} at "
        f"{first_place}: all ranks gather a parameter together.",
        "Read the same parameters on all ranks, in the same order.",
    )


def has_ended(group: ProcessGroup) -> bool:
    """Return whether a process group was destroyed."""
    try:
        dist.get_backend(group)
    except ValueError:  # raised for a group that torch no longer knows
        return True
    return False


def raise_together(error: SmartInfinityError | None, group: ProcessGroup | None) -> None:
    """Raise on every rank if any rank has an error: the rank's own error, or that of the first rank with one.

    If one rank raised alone, the others would wait in their next collective. An error that not all ranks have names the
    rank and the host that it comes from.
    """
    met = gather((error, platform.node()), group)
    failed = [rank for rank, (other, _) in enumerate(met) if other is not None]
    if not failed:
        return
    first, host = met[failed[0]] if error is None else (error, platform.node())
    assert first is not None
    if len(failed) < len(met):
        rank = failed[0] if error is None else dist.get_rank(group)
        first.problem = f"{first.problem} It comes from rank {rank} on {host}."
        first.args = (f"{first.problem} {first.remedy}",)
    raise first


@contextmanager
def raising_together(group: ProcessGroup | None = None) -> Iterator[None]:
    """Raise on every rank if the body raised on any rank. Every rank must enter and leave the context."""
    error = None
    try:
        yield
    except SmartInfinityError as caught:
        error = caught
    raise_together(error, group)


@contextmanager
def failing_together(group: ProcessGroup | None) -> Iterator[None]:
    """Do the same as :func:`raising_together`, for hot paths: ranks exchange only one number unless one failed."""
    error = None
    try:
        yield
    except SmartInfinityError as caught:
        error = caught
    if sum_over_ranks(float(error is not None), group) > 0:
        raise_together(error, group)


def sum_over_ranks(value: float, group: ProcessGroup | None) -> float:
    """Return the sum of one double over all ranks, reduced on the training device."""
    return sums_over_ranks([value], group)[0]


def sums_over_ranks(values: Sequence[float], group: ProcessGroup | None) -> list[float]:
    """Return the sum of each double over all ranks, like :func:`sum_over_ranks`, in one all-reduce."""
    if dist.get_world_size(group) == 1:
        return list(values)
    from deepspeed.accelerator import get_accelerator

    totals = torch.tensor(values, dtype=torch.float64, device=get_accelerator().current_device_name())
    dist.all_reduce(totals, group=group)
    sums: list[float] = totals.tolist()
    return sums


def show_on_rank_zero(what: str, total_bytes: int | None) -> AbstractContextManager[Advance]:
    """Show on rank 0 the progress of long work that is divided over all ranks.

    Args:
        what: Description of the work.
        total_bytes: Number of bytes that this rank processes; None if unknown.
    """
    return showing_progress(what, total_bytes, shown=dist.get_rank() == 0)
