"""Everything that SmartSSDs need to update, looked at one by one: what ``smart-infinity selftest`` shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lightning_smartinfinity.config import SmartSSDConfig, storage_folders
from lightning_smartinfinity.devices.smartssd.cards import Card, cards_of, unusable_node, without_driver
from lightning_smartinfinity.devices.smartssd.discovery import CardPlan, paired_cards
from lightning_smartinfinity.devices.smartssd.kernels import KERNELS, Kernel
from lightning_smartinfinity.devices.smartssd.p2p import P2PState
from lightning_smartinfinity.devices.smartssd.runtime import Runtime, choose_binding, require_runtime, runtime_of
from lightning_smartinfinity.devices.smartssd.scratch import scratch_folder
from lightning_smartinfinity.devices.smartssd.self_test import check_kernel, check_p2p
from lightning_smartinfinity.devices.smartssd.system import System
from lightning_smartinfinity.devices.smartssd.xclbin import Xclbin, read_xclbin
from lightning_smartinfinity.errors import SmartInfinityError

__all__ = ["Finding", "examine"]

_BINDING = "called by"
_UNFORESEEN = "This is an error of lightning-smartinfinity: please report it, with what is shown here."
_GIB = 1 << 30
_MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Args:
        subject: What it belongs to, as ``"card 0000:3d:00.1"``.
        name: Of what was looked at.
        ok: Whether it is as it must be; None: it only tells, or could not be looked at.
        value: What was found.
        remedy: What to do where it is not.
    """

    subject: str
    name: str
    ok: bool | None
    value: str
    remedy: str = ""


def examine(
    named: Sequence[str | Path], settings: SmartSSDConfig, system: System, *, p2p_bytes: int = 64 * _MIB
) -> Iterator[Finding]:
    """Look at XRT, the xclbin and the cards, then work each folder's card.

    Args:
        named: Storage folders, as for training; none: no card is worked.
        settings: As for training.
        system: This machine.
        p2p_bytes: To move in each direction between a card and its SSD.

    Yields:
        Findings, as soon as they are made; one that is not ok does not end it.
    """
    runtime = runtime_of(system)
    of_runtime = _of_runtime(runtime, settings, system)
    yield from of_runtime
    xclbins: list[Xclbin] = []
    yield from _tried("xclbin", "file", lambda: _of_xclbin(settings, system, xclbins))
    yield from _tried("cards", "found", lambda: list(_of_cards(system)))
    if not named:
        yield Finding("folders", "named", None, "none: P2P and kernels are not tried. Name folders on the cards' SSDs.")
        return
    folders: list[Path] = []
    yield from _tried("folders", "named", lambda: _of_folders(named, folders))
    paired: list[Card] = []
    if folders:
        yield from _tried("folders", "pairing", lambda: _of_pairs(folders, settings, system, paired))
    bindings = [found.value for found in of_runtime if found.name == _BINDING and found.ok]
    if paired and xclbins and bindings and runtime.root is not None:
        plan = CardPlan(
            xclbin=xclbins[0],
            cards=tuple(paired),
            settings=settings,
            binding=bindings[0],
            library=runtime.library,
        )
        yield from _at_work(plan, folders, p2p_bytes)


def _of_runtime(runtime: Runtime, settings: SmartSSDConfig, system: System) -> list[Finding]:
    def root() -> list[Finding]:
        require_runtime(runtime)
        return [Finding("XRT", "XILINX_XRT", True, str(runtime.root))]

    def binding() -> list[Finding]:
        return [Finding("XRT", _BINDING, True, choose_binding(settings.binding, runtime))]

    version = Finding("XRT", "version", None, runtime.version or "not told")
    found = [*_tried("XRT", "XILINX_XRT", root), version, *_tried("XRT", _BINDING, binding)]
    if system.emulated:
        mode = system.environment["XCL_EMULATION_MODE"]
        found.append(Finding("XRT", "emulation", None, f"XCL_EMULATION_MODE={mode}: no real card is used"))
    return found


def _of_xclbin(settings: SmartSSDConfig, system: System, found: list[Xclbin]) -> list[Finding]:
    xclbin = read_xclbin(settings, system)
    found.append(xclbin)
    return [
        Finding("xclbin", "file", True, str(xclbin.path)),
        Finding("xclbin", "built for", None, xclbin.platform or "not told"),
        Finding("xclbin", "uuid", None, xclbin.uuid),
    ]


def _of_cards(system: System) -> Iterator[Finding]:
    if system.emulated:
        return
    cards = cards_of(system)
    silent = without_driver(system)
    if silent:
        yield Finding("cards", "driver", False, f"xocl does not hold {', '.join(silent)}", "Load it: modprobe xocl.")
    if not cards:
        remedy = "Check lspci -d 10ee: and, in a virtual machine, that the card is passed through."
        yield Finding("cards", "found", False, "none", remedy)
    for card in cards:
        yield from _of_card(system, card)


def _of_card(system: System, card: Card) -> Iterator[Finding]:
    yield Finding(card.label, "shell", None, card.shell or "not told")
    reason = unusable_node(system, card)
    yield Finding(
        card.label,
        "device node",
        reason is None,
        reason or f"{card.node or 'not told'}",
        "" if reason is None else "Give this user access, and log in again.",
    )
    p2p = card.p2p
    usable = True if p2p.state is P2PState.ENABLED else None if p2p.state is P2PState.UNKNOWN else False
    sizes = f", {_size(p2p.bar_bytes)} of {_size(p2p.expected_bytes)}" if p2p.bar_bytes and p2p.expected_bytes else ""
    yield Finding(card.label, "P2P", usable, f"{p2p.state.value}{sizes}", "" if usable else p2p.remedy(card.address))


def _of_folders(named: Sequence[str | Path], found: list[Path]) -> list[Finding]:
    """Nothing to tell where training would take them."""
    found += storage_folders(list(named)) or ()
    return []


def _of_pairs(folders: Sequence[Path], settings: SmartSSDConfig, system: System, found: list[Card]) -> list[Finding]:
    found += paired_cards(folders, settings, system)
    return [Finding(str(folder), "card", True, card.label) for folder, card in zip(folders, found, strict=True)]


def _at_work(plan: CardPlan, folders: Sequence[Path], p2p_bytes: int) -> Iterator[Finding]:
    for card, folder in zip(plan.cards, folders, strict=True):
        yield from _tried(card.label, "P2P at work", partial(_p2p_at_work, plan, card, folder, p2p_bytes))
        for kernel in KERNELS:
            yield from _tried(card.label, kernel.name, partial(_kernel_at_work, plan, card, folder, kernel))


def _p2p_at_work(plan: CardPlan, card: Card, folder: Path, nbytes: int) -> list[Finding]:
    with scratch_folder(card, folder) as scratch:
        moved = check_p2p(plan, card, scratch, nbytes=nbytes)
    speed = f"{moved.read / 1e9:.2f} GB/s from the SSD, {moved.write / 1e9:.2f} GB/s to it"
    return [Finding(card.label, "P2P at work", True, f"{_size(nbytes)} written back unchanged; {speed}")]


def _kernel_at_work(plan: CardPlan, card: Card, folder: Path, kernel: Kernel) -> list[Finding]:
    with scratch_folder(card, folder) as scratch:
        check_kernel(plan, card, kernel, scratch)
    return [Finding(card.label, kernel.name, True, "one tasklet, bit for bit as on the host")]


def _tried(subject: str, name: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """What is found, or the error that it ends in as a finding."""
    try:
        return look()
    except SmartInfinityError as error:
        return [Finding(subject, name, False, error.problem, error.remedy)]
    except Exception as error:  # what nobody foresaw is no reason to leave the rest unseen
        return [Finding(subject, name, False, f"{type(error).__name__}: {error}", _UNFORESEEN)]


def _size(nbytes: int) -> str:
    return f"{nbytes / _GIB:.4g} GiB" if nbytes >= _GIB else f"{nbytes / _MIB:.4g} MiB"
