"""``smart-infinity convert``: converts kept optimizer state to another state format."""

from __future__ import annotations

import argparse

from lightning_smartinfinity.cli.option_types import add_quiet, show_of, storage_folder
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES, TransferConfig

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
Write the optimizer state that a run with TransferConfig(keep=True) left, of every rank, anew in another state format
and other folders. The old state stays. Ctrl-C removes partial output. After a kill, the next run overwrites it.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument("folders", nargs="+", type=storage_folder, help="its storage folders, in the order of the run")
    parser.add_argument(
        "--into", nargs="+", type=storage_folder, required=True, help="storage folders for the new state"
    )
    parser.add_argument("--state-format", choices=tuple(STATE_FORMATS), required=True, help="of the new state")
    parser.add_argument("--job", default=TransferConfig.job, help="TransferConfig(job=...) of the run")
    parser.add_argument("--rank", type=int, help="convert the state of this rank alone")
    parser.add_argument(
        "--tasklet-bytes",
        default=HOST_TASKLET_BYTES,
        metavar="SIZE",
        help="TransferConfig(tasklet_bytes=...) of the new state, such as 64MiB (default: %(default)s)",
    )
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.pipeline.state.convert import convert_store  # imports torch, which is slow

    ranks = convert_store(
        options.folders,
        options.into,
        state_format=options.state_format,
        job=options.job,
        rank=options.rank,
        tasklet_bytes=options.tasklet_bytes,
        show=show_of(options),
    )
    whose = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
    print(f"Converted the state of {whose} to {options.state_format}: {', '.join(map(str, options.into))}")
    return 0
