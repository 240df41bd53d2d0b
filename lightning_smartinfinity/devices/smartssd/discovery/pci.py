"""Reads PCI functions and their paths from sysfs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.devices.smartssd.discovery.system import System, entries_of, text_of

__all__ = ["PciPath", "common_ancestors", "drawn", "functions_of_class", "path_of"]

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.IGNORECASE)


@dataclass(frozen=True)
class PciPath:
    """The path from a root complex to a function.

    Args:
        steps: The root complex, every bridge and the function itself, such as ``("pci0000:3a", "0000:3a:00.0", ...)``.
    """

    steps: tuple[str, ...]

    @property
    def address(self) -> str:
        """Address of the function: domain, bus, device and function number."""
        return self.steps[-1]


def path_of(device: Path) -> PciPath | None:
    """Return the path of a device's PCI function, or of its nearest ancestor's; ``None`` if there is none.

    Args:
        device: Path below ``sysfs/devices``, or a link to one.
    """
    steps: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    for part in device.resolve().parts:
        if _ROOT.fullmatch(part) or (followed and _ADDRESS.fullmatch(part)):
            followed = (*followed, part)
            steps = followed if _ADDRESS.fullmatch(part) else steps
    return PciPath(steps) if steps else None


def functions_of_class(system: System, prefix: str) -> list[Path]:
    """Return the folders of all PCI functions whose class has this prefix, such as ``"0x0108"``, by address."""
    return [
        function
        for function in entries_of(system.sysfs / "bus/pci/devices")
        if (text_of(function / "class") or "").startswith(prefix)
    ]


def common_ancestors(one: PciPath, other: PciPath) -> int:
    """Count the common ancestors of two functions, from the root on; return 0 if only the root complex is shared."""
    shared = 0
    for mine, theirs in zip(one.steps[:-1], other.steps[:-1], strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared if shared > 1 else 0


def drawn(labels: Mapping[PciPath, str]) -> str:
    """Draw a tree of functions, one line for each step.

    Args:
        labels: Text to show after each function's address.
    """
    named = {path.steps: label for path, label in labels.items()}
    return "\n".join(_branches(sorted(named), named, depth=0))


def _branches(paths: Iterable[tuple[str, ...]], named: Mapping[tuple[str, ...], str], *, depth: int) -> list[str]:
    below: dict[str, list[tuple[str, ...]]] = {}
    for path in paths:
        if len(path) > depth:
            below.setdefault(path[depth], []).append(path)
    lines = []
    for step, members in below.items():
        label = named.get(members[0][: depth + 1], "")
        lines.append(f"  {'  ' * depth}{step}{f'  {label}' if label else ''}")
        lines += _branches(members, named, depth=depth + 1)
    return lines
