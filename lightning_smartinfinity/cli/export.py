"""``smart-infinity export``: writes the weights of a checkpoint for transformers or for plain Lightning."""

from __future__ import annotations

import argparse

from lightning_smartinfinity.cli.option_types import add_weights_only, named_path

__all__ = ["DESCRIPTION", "add_options", "run"]

DESCRIPTION = """\
Write the weights of a checkpoint for use without this package: a folder that from_pretrained of transformers loads, or
one file that load_from_checkpoint of Lightning takes. Takes checkpoints of this strategy, of stock DeepSpeed with
ZeRO-3, and universal ones. Memory stays bounded whatever the size. OUT must not exist, or be an empty folder; it is
complete or absent: an error or Ctrl-C leaves nothing. The checkpoint stays. OUT has checksums, which
`smart-infinity scrub OUT` compares.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument("checkpoint", type=named_path, help="the folder that was saved")
    parser.add_argument("out", type=named_path, metavar="OUT", help="folder (safetensors) or file (lightning) to write")
    parser.add_argument(
        "--to",
        choices=("safetensors", "lightning"),
        default="safetensors",
        help="a folder for from_pretrained, or a file for load_from_checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--model",
        type=named_path,
        metavar="FOLDER",
        help="folder of the model before the training: its tokenizer is copied, and it supplies frozen weights that "
        "the checkpoint lacks, and the configuration of checkpoints of stock DeepSpeed",
    )
    parser.add_argument("--submodule", metavar="NAME", help="which model of transformers, if the module has several")
    parser.add_argument(
        "--dtype",
        choices=("fp32", "bf16", "fp16"),
        help="of trained weights (default: the training's for safetensors, fp32 for lightning)",
    )
    parser.add_argument("--max-shard-size", metavar="SIZE", help="split larger weights, such as 5GB")
    add_weights_only(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command, and return the exit status."""
    from lightning_smartinfinity.zero3 import prepare_environment  # imports DeepSpeed, which is slow

    prepare_environment("cpu", local_world_size=1)
    from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint

    settings = ExportSettings(
        to=options.to,
        model=options.model,
        submodule=options.submodule,
        dtype=options.dtype,
        max_shard_size=options.max_shard_size,
        weights_only=options.weights_only,
    )
    for sentence in export_checkpoint(options.checkpoint, options.out, settings):
        print(sentence)
    return 0
