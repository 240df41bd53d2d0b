"""PCI functions and the way to each of them, as sysfs tells it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lightning_smartinfinity.devices.smartssd.system import System, entries_of, text_of

__all__ = ["PciPath", "common_ancestors", "drawn", "functions_of_class", "path_of"]

_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", re.IGNORECASE)
_ROOT = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}", re.IGNORECASE)


@dataclass(frozen=True)
class PciPath:
    """The way from a root complex to a function.

    Args:
        steps: The root complex, every bridge and the function itself, as ``("pci0000:3a", "0000:3a:00.0", ...)``.
    """

    steps: tuple[str, ...]

    @property
    def address(self) -> str:
        """Of the function: domain, bus, device and function number."""
        return self.steps[-1]


def path_of(device: Path) -> PciPath | None:
    """The way to the last PCI function on a device's path; None: it hangs on none.

    Args:
        device: Below ``sysfs/devices``, or a link there.
    """
    steps: tuple[str, ...] = ()
    followed: tuple[str, ...] = ()
    for part in device.resolve().parts:
        if _ROOT.fullmatch(part) or (followed and _ADDRESS.fullmatch(part)):
            followed = (*followed, part)
            steps = followed if _ADDRESS.fullmatch(part) else steps
    return PciPath(steps) if steps else None


def functions_of_class(system: System, prefix: str) -> list[Path]:
    """Folders of all PCI functions whose class begins like this, as ``"0x0108"``, by address."""
    return [
        function
        for function in entries_of(system.sysfs / "bus/pci/devices")
        if (text_of(function / "class") or "").startswith(prefix)
    ]


def common_ancestors(one: PciPath, other: PciPath) -> int:
    """How many steps two functions share from the root on; a root complex alone counts as none."""
    shared = 0
    for mine, theirs in zip(one.steps[:-1], other.steps[:-1], strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared if shared > 1 else 0


def drawn(labels: Mapping[PciPath, str]) -> str:
    """A tree of functions, one line for each step.

    Args:
        labels: What stands behind each function's address.
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
