"""Chooses where the update runs, and makes the device.

All ranks check the choice and agree on it before anything else is set up. Of ``zero3``, only this module uses cards.
"""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch.distributed import ProcessGroup

from lightning_smartinfinity import native
from lightning_smartinfinity.common.machine import available_cores, machine_identity
from lightning_smartinfinity.devices import HostDevice, StorageDevice
from lightning_smartinfinity.devices.smartssd import (
    CardRing,
    CardSetup,
    SmartSSDDevice,
    System,
    find_cards,
    gradient_file_bytes,
    kernel_of,
    require_memory,
    ring_within,
    self_test,
    share_of_memory,
)
from lightning_smartinfinity.devices.smartssd.kernels import LARGEST_NUMEL, Kernel
from lightning_smartinfinity.devices.smartssd.unreturned import close_returned
from lightning_smartinfinity.errors import ConfigError, DeviceError, SmartInfinityError
from lightning_smartinfinity.native.formats import STATE_FORMATS, names_where
from lightning_smartinfinity.pipeline.layout.ring import update_threads
from lightning_smartinfinity.settings import SmartSSDConfig
from lightning_smartinfinity.settings.smartssd import is_xclbin_named
from lightning_smartinfinity.storage.extents import BLOCK_BYTES, ExtentMap
from lightning_smartinfinity.zero3.ranks.collectives import gather, raise_together
from lightning_smartinfinity.zero3.settings import OffloadSettings

__all__ = ["card_file_bytes", "choose_update_device", "compute_threads", "make_device", "takes_tasklets"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_SMALL_TASKLET_BYTES = 16 << 20
_LEAST_GRADIENT_BYTES = 2  # per element


class _Report(NamedTuple):
    """The result of one rank's search: its cards, or the reason why it has none.

    Attributes:
        machine: Result of :func:`machine_identity`.
        host: Name of the machine, for messages.
        process: Id of the rank's process.
        cards: Addresses of the cards.
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
    """Return the settings with the cards that run the update; unchanged if the host runs it. Collective.

    Args:
        offload: Settings, the same on all ranks.
        optimizer: Class name of the torch optimizer.
        group: Process group of all ranks.

    Raises:
        ConfigError, DeviceError, StorageError: ``update_device="smartssd"``, and cards cannot be used on some rank;
            raised on every rank.
    """
    close_returned()  # first, because an abandoned call may still lock a folder that the store needs
    obstacle = _obstacle(offload)
    if obstacle is not None:
        _log.info("update_device='auto': the host updates: %s.", obstacle)
    if offload.update_device == "host" or obstacle is not None:
        return offload
    setup, error = _outcome_of(lambda: _find(offload, optimizer))
    reports = gather(_report(setup, error), group)
    error = error or _disagreement(reports)
    first = error or _first_error(reports)
    if first is None and setup is not None:
        error = _outcome_of(partial(_test, offload, setup, kernel_of(optimizer), reports))[1]
        first = _first_error(gather(_report(setup, error), group))
    if offload.update_device == "smartssd":
        raise_together(error, group)
    if first is None and setup is not None:
        setup = replace(setup, sharers=_sharers(reports))
        error = _outcome_of(partial(_require_memory, replace(offload, cards=setup), setup, kernel_of(optimizer)))[1]
        if offload.update_device == "smartssd":
            raise_together(error, group)
        first = _first_error(gather(_report(setup, error), group))
    if first is not None or setup is None:
        # Log only the text: a log record with the error would keep its traceback alive, and with it card buffers.
        _log.warning("update_device='auto': the host updates, since SmartSSDs cannot: %s", str(first))
        return offload
    _warn_of_settings(offload)
    return replace(offload, cards=setup)


def _first_error(reports: Sequence[_Report]) -> SmartInfinityError | None:
    return next((report.error for report in reports if report.error is not None), None)


def _obstacle(offload: OffloadSettings) -> str | None:
    """Return why ``"auto"`` does not search for cards; None if it does."""
    if offload.update_device != "auto":
        return None
    if not is_xclbin_named(offload.smartssd):
        return "no xclbin for SmartSSDs is named"
    if not STATE_FORMATS[offload.state_format].on_cards:
        return f"SmartSSDs hold state in {names_where(lambda form: form.on_cards)} alone, not {offload.state_format!r}"
    return None


def _outcome_of(work: Callable[[], T]) -> tuple[T | None, SmartInfinityError | None]:
    """Return the result or the error of ``work``; an error raised here would leave the other ranks waiting."""
    try:
        return work(), None
    except SmartInfinityError as error:
        return None, error
    except Exception as error:
        return None, DeviceError(f"SmartSSDs could not be set up: {error!r}.", "Use update_device='host'.")


def _find(offload: OffloadSettings, optimizer: str) -> CardSetup:
    _require_direct_io(offload)
    kernel = kernel_of(optimizer)
    _require_tasklets(offload, kernel)
    plan = find_cards(offload.storage, offload.smartssd or SmartSSDConfig(), System())
    if kernel.name not in plan.xclbin.kernels:
        raise DeviceError(
            f"The xclbin {plan.xclbin.path} has no kernel {kernel.name}; it has {', '.join(plan.xclbin.kernels)}.",
            f"Build one for {optimizer} with `make -C hls xclbin OPTIMIZER={kernel.rule.name}`.",
        )
    return plan


def _test(offload: OffloadSettings, setup: CardSetup, kernel: Kernel, reports: Sequence[_Report]) -> None:
    """Test this rank's cards, except those that it shares with a lower rank, which tests them."""
    testers: dict[tuple[str, str], int] = {}
    for report in reports:
        for card in report.cards:
            testers.setdefault((report.machine, card), report.process)
    own = _report(setup, None)
    mine = [
        (card, folder)
        for card, folder in zip(setup.cards, offload.storage, strict=True)
        if testers[own.machine, card.address] == own.process
    ]
    self_test(replace(setup, cards=tuple(card for card, _ in mine)), [folder for _, folder in mine], [kernel])


def _require_direct_io(offload: OffloadSettings) -> None:
    if offload.transfer.file_access == "off":
        raise ConfigError(
            f"TransferConfig(io_engine={offload.transfer.io_engine!r}, direct_io={offload.transfer.direct_io!r}) puts"
            " state into the page cache, which SmartSSDs cannot reach.",
            "Use io_engine='auto' and direct_io='on'.",
        )


def _require_tasklets(offload: OffloadSettings, kernel: Kernel) -> None:
    nbytes, largest = offload.transfer.buffer_bytes, LARGEST_NUMEL * kernel.num_arrays * 4
    if nbytes is not None and nbytes > largest + BLOCK_BYTES:
        raise ConfigError(
            f"TransferConfig(tasklet_bytes={nbytes}) is too large for SmartSSDs, whose {kernel.name} works at most"
            f" {LARGEST_NUMEL} elements at once.",
            f"Leave it out (the default is 64 MiB), or pass {largest} at most.",
        )


def _require_memory(offload: OffloadSettings, setup: CardSetup, kernel: Kernel) -> None:
    share_of_memory(setup)  # raises if the share is unknown
    if offload.update_device != "auto":
        return
    # Check now, while the host can still be chosen: later, tasklets are sized for the chosen device.
    ring = _ring(offload, offload.tasklet_bytes // (kernel.num_arrays * 4))
    for card in setup.cards:
        require_memory(setup, card, ring, extent_bytes=offload.tasklet_bytes)


def _report(setup: CardSetup | None, error: SmartInfinityError | None) -> _Report:
    cards = () if setup is None else tuple(card.address for card in setup.cards)
    build = "" if setup is None else setup.xclbin.uuid
    return _Report(machine_identity(), platform.node(), os.getpid(), cards, build, error)


def _disagreement(reports: Sequence[_Report]) -> SmartInfinityError | None:
    """Return an error if ranks that share a card name different xclbins."""
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
    """Return the largest number of processes that share a card; it sets every process's share, so rings are equal."""
    uses = Counter((report.machine, card) for report in reports for card in report.cards)
    return max(uses.values())


def _warn_of_settings(offload: OffloadSettings) -> None:
    transfer = offload.transfer
    if transfer.buffer_bytes is not None and transfer.buffer_bytes < _SMALL_TASKLET_BYTES:
        warnings.warn(
            f"TransferConfig(tasklet_bytes={transfer.buffer_bytes}) is small for SmartSSDs, whose P2P wants 16 MiB or"
            " more at once. Leave it out: the default is 64 MiB.",
            stacklevel=2,
        )
    if transfer.dram_cache_bytes:
        warnings.warn(
            f"TransferConfig(dram_cache_bytes={transfer.dram_cache_bytes!r}) is ignored: SmartSSDs update beside their"
            " storage, and no state stays in host memory.",
            stacklevel=2,
        )


def takes_tasklets(settings: OffloadSettings, extents: ExtentMap) -> bool:
    """Return whether the device that updates can work tasklets of state that an earlier training has left.

    Args:
        settings: Result of :func:`choose_update_device`.
        extents: The extents of the state.
    """
    numel = extents.tasklet_numel
    has_blocks = extents.num_tasklets == 1 or numel * _LEAST_GRADIENT_BYTES % BLOCK_BYTES == 0
    return settings.cards is None or (has_blocks and min(numel, extents.numel) <= LARGEST_NUMEL)


def compute_threads(wanted: int | str, *, num_processes: int, on_gpu: bool) -> int:
    """Return the number of threads with which one process updates.

    Args:
        wanted: ``TransferConfig.compute_threads``.
        num_processes: Number of processes on this machine, which share its cores.
        on_gpu: Whether a GPU computes forward and backward, and leaves the cores to the update.
    """
    if isinstance(wanted, int):
        return wanted
    return update_threads(available_cores() // num_processes, on_gpu=on_gpu)


def make_device(
    settings: OffloadSettings, extents: ExtentMap, optimizer: str, memory: Sequence[native.HostBuffer] = ()
) -> StorageDevice:
    """Return the device that updates, which is not open yet.

    Args:
        settings: Result of :func:`choose_update_device`.
        extents: The extents of this rank's tasklets.
        optimizer: Name of the update rule.
        memory: Memory for the resident tasklets, if the host updates.
    """
    transfer, cards = settings.transfer, settings.cards
    host: dict[str, Any] = {name: getattr(transfer, name) for name in ("compute_threads", "io_engine", "io_timeout")}
    if cards is None:
        return HostDevice(num_buffers=settings.num_buffers, resident_memory=memory, **host)
    return SmartSSDDevice(cards, kernel=kernel_of(optimizer), ring=_ring(settings, extents.tasklet_numel), **host)


def card_file_bytes(settings: OffloadSettings, extents: ExtentMap) -> int:
    """Return the size of the file by which gradients reach each card; 0 without such a file or without cards."""
    if settings.cards is None:
        return 0
    largest = max((extent.nbytes for extent in extents.extents), default=0)
    ring = ring_within(settings.cards, _ring(settings, extents.tasklet_numel), extent_bytes=largest)
    return gradient_file_bytes(settings.cards, ring)


def _ring(settings: OffloadSettings, numel: int) -> CardRing:
    """Return the wanted ring of each card, for tasklets of ``numel`` elements."""
    return CardRing(
        num_buffers=settings.num_buffers,
        gradient_buffer_bytes=settings.transferred_gradient_bytes(numel),
        parameter_bytes=settings.parameter_itemsize * numel,
    )
