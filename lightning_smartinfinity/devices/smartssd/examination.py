"""Checks all requirements of SmartSSDs for updates; ``smart-infinity selftest`` shows the findings."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup, paired_cards
from lightning_smartinfinity.devices.smartssd.discovery.cards import (
    Card,
    cards_of,
    driver_version,
    unusable_node,
    without_driver,
)
from lightning_smartinfinity.devices.smartssd.discovery.p2p import P2PState
from lightning_smartinfinity.devices.smartssd.discovery.runtime import (
    Runtime,
    choose_binding,
    require_runtime,
    runtime_of,
)
from lightning_smartinfinity.devices.smartssd.discovery.system import System
from lightning_smartinfinity.devices.smartssd.discovery.xclbin import read_xclbin
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS, Kernel
from lightning_smartinfinity.devices.smartssd.opening import SELF_TEST_ADVICE, open_card
from lightning_smartinfinity.devices.smartssd.scratch import scratch_folder
from lightning_smartinfinity.devices.smartssd.self_test import check_kernel, check_p2p
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.settings import SmartSSDConfig, storage_folders

__all__ = ["Finding", "examine"]

_T = TypeVar("_T")
_UNFORESEEN = "This is an error of lightning-smartinfinity: please report it with this output."
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Args:
        subject: Object of the check, such as ``"card 0000:3d:00.1"``.
        name: Name of the check.
        ok: Whether the check passed; ``None`` if it only informs or could not be made.
        value: Value found.
        remedy: Advice for the user if the check failed.
    """

    subject: str
    name: str
    ok: bool | None
    value: str
    remedy: str = ""


def examine(
    named: Sequence[str | Path], settings: SmartSSDConfig, system: System, *, p2p_bytes: int = 64 * _MIB
) -> Iterator[Finding]:
    """Check XRT, the xclbin and the cards, then run P2P transfers and kernels on the card of each folder.

    Args:
        named: Storage folders, as for training; without folders, no card is run.
        settings: Settings, as for training.
        system: This machine.
        p2p_bytes: Bytes to move in each direction between a card and its SSD.

    Yields:
        Findings, one after each check; a failed check does not end the examination.
    """
    runtime = runtime_of(system)
    binding = yield from _runtime_findings(runtime, settings, system)
    xclbin = yield from _tried("xclbin", "file", lambda: read_xclbin(settings, system))
    if xclbin is not None:
        yield Finding("xclbin", "file", True, str(xclbin.path))
        yield Finding("xclbin", "built for", None, xclbin.platform or "unknown")
        yield Finding("xclbin", "uuid", None, xclbin.uuid)
    found = yield from _tried("cards", "found", lambda: list(_cards_found(system)))
    yield from found or ()
    if not named:
        yield Finding("folders", "named", None, "none: P2P and kernels are not tried. Name folders on the cards' SSDs.")
        return
    resolve = partial(storage_folders, list(named), owner="smart-infinity selftest")
    folders = yield from _tried("folders", "named", resolve)
    if not folders:
        return
    paired = yield from _tried("folders", "pairing", lambda: paired_cards(folders, settings, system))
    for card, folder in zip(paired or (), folders, strict=False):
        yield Finding(str(folder), "card", True, card.label)
    if paired and xclbin is not None and binding is not None:
        setup = CardSetup(
            xclbin=xclbin, cards=tuple(paired), settings=settings, binding=binding, library=runtime.library
        )
        for card, folder in zip(paired, folders, strict=True):
            if unusable_node(system, card) is None:  # otherwise the device node's finding already failed
                yield from _at_work(setup, card, folder, p2p_bytes)


def _runtime_findings(
    runtime: Runtime, settings: SmartSSDConfig, system: System
) -> Generator[Finding, None, str | None]:
    """Examine XRT; return the binding that calls it, ``None`` if it cannot be called."""
    root = yield from _checked("XRT", "XILINX_XRT", lambda: str(require_runtime(runtime)))
    yield Finding("XRT", "version", None, runtime.version or "unknown")
    binding = yield from _checked("XRT", "called by", lambda: choose_binding(settings.binding, runtime))
    if system.emulated:
        mode = system.environment["XCL_EMULATION_MODE"]
        yield Finding("XRT", "emulation", None, f"XCL_EMULATION_MODE={mode}: no real card is used")
    return binding if root is not None else None


def _cards_found(system: System) -> Iterator[Finding]:
    if system.emulated:
        return
    cards = cards_of(system)
    silent, version = without_driver(system), driver_version(system)
    if version is not None:
        yield Finding("cards", "xocl version", None, version or "unknown")
    if silent:
        yield Finding("cards", "driver", False, f"xocl does not hold {', '.join(silent)}", "Load it: modprobe xocl.")
    if not cards and not silent:
        remedy = "Check lspci -d 10ee: and, in a virtual machine, that the card is passed through."
        if version is None:
            remedy = f"Install XRT's drivers, or load: modprobe xocl. {remedy}"
            yield Finding("cards", "found", False, "none: XRT's driver xocl is not loaded", remedy)
        else:
            yield Finding("cards", "found", False, "none: XRT's driver xocl holds no card", remedy)
    for card in cards:
        yield from _card_findings(system, card)


def _card_findings(system: System, card: Card) -> Iterator[Finding]:
    yield Finding(card.label, "shell", None, card.shell or "unknown")
    reason = unusable_node(system, card)
    yield Finding(
        card.label,
        "device node",
        reason is None,
        reason or str(card.node or "unknown"),
        "" if reason is None else "Give this user access, and log in again.",
    )
    p2p = card.p2p
    usable = True if p2p.state is P2PState.ENABLED else None if p2p.state is P2PState.UNKNOWN else False
    sizes = f", {_size(p2p.bar_bytes)} of {_size(p2p.expected_bytes)}" if p2p.bar_bytes and p2p.expected_bytes else ""
    yield Finding(card.label, "P2P", usable, f"{p2p.state.value}{sizes}", "" if usable else p2p.remedy(card.address))


def _at_work(setup: CardSetup, card: Card, folder: Path, p2p_bytes: int) -> Iterator[Finding]:
    if (yield from _checked(card.label, "opened", partial(_opened, setup, card))) is None:
        return
    yield from _checked(card.label, "P2P at work", partial(_p2p_at_work, setup, card, folder, p2p_bytes))
    for kernel in (kernel for kernel in KERNELS if kernel.name in setup.xclbin.kernels):
        yield from _checked(card.label, kernel.name, partial(_kernel_at_work, setup, card, folder, kernel))


def _opened(setup: CardSetup, card: Card) -> str:
    open_card(setup, card).close()
    return "the xclbin is loaded"


def _p2p_at_work(setup: CardSetup, card: Card, folder: Path, nbytes: int) -> str:
    with scratch_folder(card, folder) as scratch:
        moved = check_p2p(setup, card, scratch, nbytes=nbytes)
    speed = f"{moved.read / 1e9:.2f} GB/s from the SSD, {moved.write / 1e9:.2f} GB/s to it"
    return f"{_size(nbytes)} written back unchanged; {speed}"


def _kernel_at_work(setup: CardSetup, card: Card, folder: Path, kernel: Kernel) -> str:
    with scratch_folder(card, folder) as scratch:
        check_kernel(setup, card, kernel, scratch)
    return "one tasklet, bit for bit as on the host"


def _checked(subject: str, name: str, check: Callable[[], str]) -> Generator[Finding, None, str | None]:
    """Run a check, and yield its value or its error as a finding; return the value, ``None`` if the check fails."""
    value = yield from _tried(subject, name, check)
    if value is not None:
        yield Finding(subject, name, True, value)
    return value


def _tried(subject: str, name: str, call: Callable[[], _T]) -> Generator[Finding, None, _T | None]:
    """Return the result of a call; if it fails, yield its error as a finding and return ``None``."""
    try:
        return call()
    except SmartInfinityError as error:
        failed = Finding(subject, name, False, error.problem, error.remedy.removesuffix(SELF_TEST_ADVICE))
    except Exception as error:  # an unforeseen error must not keep the other checks from running
        failed = Finding(subject, name, False, f"{type(error).__name__}: {error}", _UNFORESEEN)
    yield failed
    return None


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.4g} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.4g} MiB"
