"""``smart-infinity universal``: writes a copy of a checkpoint with every parameter in files of its own."""

from __future__ import annotations

import argparse

from lightning_smartinfinity.cli.option_types import add_quiet, add_weights_only, named_path, show_of
from lightning_smartinfinity.common.update_rules import optimizer_names

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = f"""\
Write a universal checkpoint: every parameter as a whole, with what the optimizer keeps of it, in files of its own, for
stock DeepSpeed (load_universal) and other tools. fit(ckpt_path=INTO) and Fabric.load take it like any checkpoint; they
need no conversion for another number of processes. Takes checkpoints of this strategy, and of stock DeepSpeed with
ZeRO-3, of {optimizer_names()}. The old checkpoint stays. Ctrl-C removes partial output.
After a kill, the next run removes it.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "checkpoint",
        type=named_path,
        nargs="+",
        help="the folder that was saved; if every machine saved its part to a disk of its own, the folders of all",
    )
    parser.add_argument("--into", type=named_path, required=True, help="folder for the new one; new or empty")
    add_weights_only(parser)
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.zero3 import prepare_environment  # imports DeepSpeed, which is slow

    prepare_environment("cpu", local_world_size=1)
    from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint

    first, *parts = options.checkpoint
    convert_checkpoint(first, options.into, parts=parts, weights_only=options.weights_only, show=show_of(options))
    print(f"Converted {', '.join(map(str, options.checkpoint))} to a universal checkpoint: {options.into}")
    return 0
