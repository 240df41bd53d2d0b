"""What is asked for on the command line, and how it ends."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lightning_smartinfinity.cli import convert, selftest, simulate, universal
from lightning_smartinfinity.errors import SmartInfinityError

__all__ = ["main"]

_INTERRUPTED = 130  # as a shell says it of SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``smart-infinity``.

    Args:
        arguments: Without the program's name; None: those of the process.

    Returns:
        Exit status: 0, 1 after an error of this package or a self-test that finds one, 130 after Ctrl-C. argparse exits
        with 2 by itself.
    """
    parser = argparse.ArgumentParser(
        prog="smart-infinity", description="Optimizer state and checkpoints of lightning-smartinfinity."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    convert.add_to(commands)
    universal.add_to(commands)
    selftest.add_to(commands)
    simulate.add_to(commands)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
    except SmartInfinityError as error:
        print(f"smart-infinity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("smart-infinity: interrupted; nothing is left of what was begun.", file=sys.stderr)
        return _INTERRUPTED
    return int(status)
