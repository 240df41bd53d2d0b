"""Where the update runs: found out, checked and agreed on by all ranks before anything else is set up."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from torch.distributed import ProcessGroup

from lightning_smartinfinity.config import SmartSSDConfig
from lightning_smartinfinity.devices.smartssd import (
    CardPlan,
    CardRing,
    System,
    find_cards,
    kernel_of,
    require_memory,
    self_test,
    share_of_memory,
)
from lightning_smartinfinity.devices.smartssd.kernels import LARGEST_NUMEL, Kernel
from lightning_smartinfinity.devices.smartssd.unreturned import close_returned
from lightning_smartinfinity.devices.smartssd.xclbin import is_xclbin_named
from lightning_smartinfinity.errors import ConfigError, DeviceError, SmartInfinityError
from lightning_smartinfinity.machine import machine_identity
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.store.extents import BLOCK_BYTES
from lightning_smartinfinity.zero3.collectives import gather, raise_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["choose_update_device"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SMALL_TASKLET_BYTES = 16 << 20


class _Report(NamedTuple):
    """What one rank found: its cards, or why it has none.

    Attributes:
        machine: As of :func:`machine_identity`.
        host: The machine's name, for people.
        process: Number of the rank's process.
        cards: Addresses.
        build: The xclbin's uuid.
        error: Why there are no cards.
    """

    machine: str
    host: str
    process: int
    cards: tuple[str, ...]
    build: str
    error: SmartInfinityError | None


def choose_update_device(
    offload: OffloadSettings, *, optimizer: str, group: ProcessGroup | None = None
) -> OffloadSettings:
    """The settings with the cards that update, if cards do. Collective.

    Args:
        offload: Settings, alike on all ranks.
        optimizer: Class name of torch's.
        group: Process group of all ranks.

    Raises:
        ConfigError, DeviceError, StorageError: ``update_device="smartssd"``, and cards cannot be used on some rank; on
            every rank.
    """
    close_returned()  # before the store asks for a folder that may have waited for it
    obstacle = _obstacle(offload)
    if offload.update_device == "host" or obstacle is not None:
        _tell(obstacle)
        return offload
    plan, error = _attempted(lambda: _find(offload, optimizer))
    reports = gather(_report(plan, error), group)
    error = error or _disagreement(reports)
    first = error or _first_error(reports)
    if first is None and plan is not None:
        error = _attempted(partial(_test, offload, plan, kernel_of(optimizer), reports))[1]
        first = _first_error(gather(_report(plan, error), group))
    if offload.update_device == "smartssd":
        raise_together(error, group)
    if first is None and plan is not None:
        plan = replace(plan, sharers=_sharers(reports))
        error = _attempted(partial(_require_memory, replace(offload, cards=plan), plan, kernel_of(optimizer)))[1]
        if offload.update_device == "smartssd":
            raise_together(error, group)
        first = _first_error(gather(_report(plan, error), group))
    if first is not None or plan is None:
        # As text: a log record that is kept would keep the error's traceback, and by it buffers on the card.
        _log.warning("update_device='auto': the host updates, since SmartSSDs cannot: %s", str(first))
        return offload
    _warn_of_settings(offload)
    return replace(offload, cards=plan)


def _first_error(reports: Sequence[_Report]) -> SmartInfinityError | None:
    return next((report.error for report in reports if report.error is not None), None)


def _obstacle(offload: OffloadSettings) -> str | None:
    """Why ``"auto"`` does not even look for cards."""
    if offload.update_device != "auto":
        return None
    if not is_xclbin_named(offload.smartssd, System()):
        return "no xclbin for SmartSSDs is named"
    if not STATE_FORMATS[offload.state_format].on_cards:
        return f"SmartSSDs hold state in {names_where(lambda form: form.on_cards)} alone, not {offload.state_format!r}"
    return None


def _tell(obstacle: str | None) -> None:
    if obstacle is not None:
        _log.info("update_device='auto': the host updates: %s.", obstacle)


def _attempted(work: Callable[[], T]) -> tuple[T | None, SmartInfinityError | None]:
    """What it returns, or what it raises: whatever that is, the other ranks must not be left waiting."""
    try:
        return work(), None
    except SmartInfinityError as error:
        return None, error
    except Exception as error:
        return None, DeviceError(f"SmartSSDs could not be set up: {error!r}.", "Use update_device='host'.")


def _find(offload: OffloadSettings, optimizer: str) -> CardPlan:
    _require_direct_io(offload)
    _require_tasklets(offload, kernel_of(optimizer))
    return find_cards(offload.storage, offload.smartssd or SmartSSDConfig(), System())


def _test(offload: OffloadSettings, plan: CardPlan, kernel: Kernel, reports: Sequence[_Report]) -> None:
    """Test those cards of this rank that no lower rank has: it would be the same test."""
    testers: dict[tuple[str, str], int] = {}
    for report in reports:
        for card in report.cards:
            testers.setdefault((report.machine, card), report.process)
    own = _report(plan, None)
    mine = [
        (card, folder)
        for card, folder in zip(plan.cards, offload.storage, strict=True)
        if testers[own.machine, card.address] == own.process
    ]
    self_test(replace(plan, cards=tuple(card for card, _ in mine)), [folder for _, folder in mine], [kernel])


def _require_direct_io(offload: OffloadSettings) -> None:
    if offload.transfer.file_access == "off":
        raise ConfigError(
            f"TransferConfig(io_engine={offload.transfer.io_engine!r}, direct_io={offload.transfer.direct_io!r}) puts"
            " state into the page cache, which SmartSSDs cannot reach.",
            "Use io_engine='auto' and direct_io='on'.",
        )


def _require_tasklets(offload: OffloadSettings, kernel: Kernel) -> None:
    nbytes, largest = offload.transfer.tasklet_bytes, LARGEST_NUMEL * kernel.num_arrays * 4
    if nbytes is not None and nbytes > largest + BLOCK_BYTES:
        raise ConfigError(
            f"TransferConfig(tasklet_bytes={nbytes}) is too large for SmartSSDs, whose {kernel.name} works at most"
            f" {LARGEST_NUMEL} elements at once.",
            f"Leave it out (the default is 64 MiB), or pass {largest} at most.",
        )


def _require_memory(offload: OffloadSettings, plan: CardPlan, kernel: Kernel) -> None:
    share_of_memory(plan)  # or an error
    if offload.update_device != "auto":
        return
    # Later it would be too late for the host: tasklets are cut for the device that updates them.
    numel = offload.tasklet_bytes // (kernel.num_arrays * 4)
    ring = CardRing(
        num_buffers=offload.transfer.num_buffers,
        gradient_bytes=offload.gradient_bytes(numel),
        parameter_bytes=offload.parameter_itemsize * numel,
    )
    for card in plan.cards:
        require_memory(plan, card, ring, extent_bytes=offload.tasklet_bytes)


def _report(plan: CardPlan | None, error: SmartInfinityError | None) -> _Report:
    cards = () if plan is None else tuple(card.address for card in plan.cards)
    build = "" if plan is None else plan.xclbin.uuid
    return _Report(machine_identity(), platform.node(), os.getpid(), cards, build, error)


def _disagreement(reports: Sequence[_Report]) -> SmartInfinityError | None:
    """Ranks on one card must load one xclbin."""
    for machine, card in sorted({(report.machine, card) for report in reports for card in report.cards}):
        sharers = [report for report in reports if report.machine == machine and card in report.cards]
        builds = {report.build for report in sharers}
        if len(builds) > 1:
            return ConfigError(
                f"The ranks on {sharers[0].host} name different xclbins for the same card {card}:"
                f" {', '.join(sorted(builds))}.",
                "Name one xclbin on all ranks that share a card.",
            )
    return None


def _sharers(reports: Sequence[_Report]) -> int:
    """Most processes that any card has: each takes such a share, so that all ranks have equal rings."""
    uses = Counter((report.machine, card) for report in reports for card in report.cards)
    return max(uses.values())


def _warn_of_settings(offload: OffloadSettings) -> None:
    transfer = offload.transfer
    if transfer.tasklet_bytes is not None and transfer.tasklet_bytes < _SMALL_TASKLET_BYTES:
        warnings.warn(
            f"TransferConfig(tasklet_bytes={transfer.tasklet_bytes}) is small for SmartSSDs, whose P2P wants 16 MiB or"
            " more at once. Leave it out: the default is 64 MiB.",
            stacklevel=2,
        )
    if transfer.dram_cache_bytes:
        warnings.warn(
            f"TransferConfig(dram_cache_bytes={transfer.dram_cache_bytes!r}) is ignored: SmartSSDs update beside their"
            " storage, and no state stays in host memory.",
            stacklevel=2,
        )
