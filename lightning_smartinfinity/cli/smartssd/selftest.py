"""``smart-infinity selftest``: reports whether this machine's SmartSSDs can update, and if not, what to do."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from lightning_smartinfinity.cli.option_types import digits, reading
from lightning_smartinfinity.cli.smartssd.options import add_cards, cards_of
from lightning_smartinfinity.settings.rules import between

__all__ = ["DESCRIPTION", "add_options", "run", "show"]

DESCRIPTION = """\
Look at XRT, the xclbin and the cards of this machine. With storage folders: pair each with its card, move data
between the card and its SSD, and update one tasklet with every kernel, bit for bit as on the host. Nothing is left in
the folders. Exit status 1 if anything is not as it must be.
"""
_MAX_MIB = 4096  # memory of a card
_MARKS = {True: "ok", False: "FAIL", None: "-"}
_mib = reading(digits, between(1, _MAX_MIB))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    add_cards(parser)
    parser.add_argument(
        "--mib", type=_mib, default=64, help=f"MiB to move by P2P, 1 to {_MAX_MIB} (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print findings as JSON")


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.devices.smartssd.discovery.system import System
    from lightning_smartinfinity.devices.smartssd.examination import examine

    findings = examine(options.folders, cards_of(options), System(), p2p_bytes=options.mib << 20)
    return show(findings, as_json=options.json)


def show(findings: Iterable[Any], *, as_json: bool) -> int:
    """Print findings as they arrive, or all of them as JSON.

    Args:
        findings: Findings of ``examine``.
        as_json: Whether to print JSON.

    Returns:
        Exit status: 1 if a check failed, otherwise 0.
    """
    shown: list[Any] = []
    for finding in findings:
        if not as_json:
            _print(finding, heading=not shown or finding.subject != shown[-1].subject)
        shown.append(finding)
    failed = sum(finding.ok is False for finding in shown)
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in shown]}, indent=2))
    else:
        print(f"\n{failed} of {len(shown)} findings are not ok." if failed else "\nEverything that was tried is ok.")
    sys.stdout.flush()
    return int(failed > 0)


def _print(finding: Any, *, heading: bool) -> None:
    if heading:
        print(finding.subject)
    print(f"  {_MARKS[finding.ok]:<4}  {finding.name:<16}{finding.value}", flush=True)
    if finding.remedy and finding.ok is not True:
        print(f"        -> {finding.remedy}", flush=True)
