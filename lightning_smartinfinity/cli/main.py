"""Parses the command line, runs the command and returns the exit status."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module

from lightning_smartinfinity.cli.output import OutputError, checked_output
from lightning_smartinfinity.errors import SmartInfinityError

__all__ = ["main"]

# The module of each command, with DESCRIPTION, add_options and run; and what the command is for.
_COMMANDS = {
    "plan": ("plan", "whether a model will fit, and with which settings"),
    "convert": ("convert", "kept state into another state format"),
    "universal": ("universal", "a checkpoint with every parameter in files of its own"),
    "export": ("export", "weights for transformers or plain Lightning"),
    "jobs": ("jobs", "list the jobs on the drives"),
    "scrub": ("scrub", "whether state or a checkpoint is whole"),
    "selftest": ("smartssd.selftest", "whether SmartSSDs can update"),
    "card-report": ("smartssd.report", "try a new SmartSSD, and pack a report"),
    "simulate": ("simulation.command", "what a training step takes elsewhere"),
}

_INTERRUPTED, _BROKEN_PIPE = 130, 141  # the values by which a shell reports SIGINT and SIGPIPE


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``smart-infinity``.

    Args:
        arguments: Arguments without the program's name; ``None`` for those of the process.

    Returns:
        Exit status: 0; 1 after an error of this package, a failed self-test or card report, damage, or output that
        cannot be written; 2 if a scrub could not check everything; 3 if a planned training does not fit; 130 after
        Ctrl-C; 141 if the reader has closed the output. argparse itself exits with 2.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="smart-infinity", description="Planning, optimizer state and checkpoints of lightning-smartinfinity."
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, (module, words) in _COMMANDS.items():
        command = commands.add_parser(name, help=words)
        if name in arguments:  # no other command is imported
            named = import_module(f"lightning_smartinfinity.cli.{module}")
            command.description = named.DESCRIPTION
            named.add_options(command)
            command.set_defaults(run=named.run)
    try:
        with checked_output():
            return _run(parser, arguments)
    except OutputError as error:
        return _tell_unwritten(error)


def _run(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> int:
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except SmartInfinityError as error:
        print(f"smart-infinity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        told = str(interrupt) or "unfinished output was removed"
        print(f"smart-infinity: interrupted; {told}.", file=sys.stderr)
        return _INTERRUPTED


def _tell_unwritten(error: OutputError) -> int:
    if error.errno == errno.EPIPE:  # the reader has closed the pipe
        return _BROKEN_PIPE
    if sys.stderr is not None:
        with suppress(OSError):
            print(f"smart-infinity: the output cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
    return 1
