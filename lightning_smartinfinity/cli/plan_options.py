"""Options of ``smart-infinity plan``."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.checks import Rule, between
from lightning_smartinfinity.cli.option_types import reading, whole_number_in
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.plan.training import BUILDS, OFFLOADS, OPTIMIZERS, PRECISIONS, Training

if TYPE_CHECKING:
    from lightning_smartinfinity.plan.choice import Resources

__all__ = ["add_options", "given_resources", "training_of"]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(k|m|g|t|ki|mi|gi|ti)?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12} | {
    f"{unit}i": 1 << (10 * power) for power, unit in enumerate("kmgt", start=1)
}


def _bytes_in(text: str) -> int | None:
    found = _SIZE.fullmatch(text.strip())
    return round(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else None


def _json_in(text: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


_size = reading(
    _bytes_in, Rule("Pass bytes such as 24GB, 24GiB or 512MB", lambda value: value is not None, "is no size")
)
_gpu_size = reading(
    lambda text: 0 if text == "none" else _bytes_in(text),
    Rule("Pass bytes such as 24GB, or none", lambda value: value is not None, "is no size"),
)
_count = reading(whole_number_in, between(1, 10**15))
_checkpoints = reading(whole_number_in, between(0, 10**6))
_arguments = reading(
    _json_in, Rule("""Pass an object such as '{"width": 1024}'""", lambda value: isinstance(value, dict), "is no JSON")
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``smart-infinity plan`` to its parser."""
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="folder or config.json of a Hugging Face model, package.module:Class of a LightningModule, or a number of"
        " parameters such as 7B; several models: a table in Markdown with a row for each",
    )
    parser.add_argument("--init-args", type=_arguments, default={}, metavar="JSON", help="arguments of the class")
    _add_training(parser.add_argument_group("the training"))
    _add_machine(parser.add_argument_group("the machine; what is left out is looked up on this one"))
    parser.add_argument("--measure", action="store_true", help="measure layers, memory and drive, in about a minute")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def _add_training(group: Any) -> None:
    def add(name: str, words: str, **how: Any) -> None:
        default = getattr(Training, name.replace("-", "_"))
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(f"--{name}", default=default, help=f"{words}{shown}", **how)

    add("batch", "sequences of a micro-batch, per process", type=_count, metavar="N")
    add("seq", "tokens of a sequence", type=_count, metavar="N")
    add("accumulate", "micro-batches of a step", type=_count, metavar="N")
    group.add_argument("--checkpointing", action="store_true", help="activations are computed anew in backward")
    add("precision", "precision of the Trainer", choices=PRECISIONS)
    add("optimizer", "class of torch.optim", choices=tuple(OPTIMIZERS))
    add("state-format", "format of the state on storage", choices=tuple(STATE_FORMATS))
    add("offload-param", "where parameters lie between uses", choices=OFFLOADS)
    add("build", "where the module builds the model", choices=BUILDS)
    add("processes", "processes on this machine, one for each GPU", type=_count, metavar="N")
    add("save-top-k", "checkpoints that are kept", type=_checkpoints, metavar="N")
    add("tokens", "tokens of the whole training", type=_count, metavar="N")


def _add_machine(group: Any) -> None:
    group.add_argument("--storage", type=Path, default=Path(), help="the storage folder (default: here)")
    group.add_argument("--gpu-memory", type=_gpu_size, metavar="SIZE", help="of each GPU; none: the CPU computes")
    group.add_argument("--gpus", type=_count, metavar="N", help="number of GPUs")
    group.add_argument("--host-memory", type=_size, metavar="SIZE", help="for all processes")
    group.add_argument("--disk", type=_size, metavar="SIZE", help="free space for state and checkpoints")
    group.add_argument("--drive-size", type=_size, metavar="SIZE", help="of the drive, for its life")
    group.add_argument("--cores", type=_count, metavar="N", help="CPU cores")
    group.add_argument("--drive-read", type=_size, metavar="RATE", help="bytes per second, such as 3GB")
    group.add_argument("--drive-write", type=_size, metavar="RATE", help="bytes per second")
    group.add_argument(
        "--tbw", type=_count, metavar="TB", help="terabytes that the drive may write (default: 600 for each TB of size)"
    )


def training_of(options: argparse.Namespace) -> Training:
    """Return the training that the options describe.

    Raises:
        ConfigError: Options contradict each other.
    """
    given = {each.name: getattr(options, each.name) for each in fields(Training) if hasattr(options, each.name)}
    return Training(**given)


def given_resources(found: Resources, options: argparse.Namespace) -> Resources:
    """Return what a machine has, with what the options say instead."""
    names = {"host_memory": options.host_memory, "disk": options.disk, "cores": options.cores}
    given = {name: value for name, value in names.items() if value is not None}
    if options.gpu_memory is not None:
        given |= {"gpu_memory": options.gpu_memory or None, "num_gpus": int(options.gpu_memory > 0)}
    if options.gpus is not None:
        given["num_gpus"] = options.gpus
    drive = options.drive_size or (options.disk if options.disk is not None else None)
    return replace(found, **given, **({"drive_bytes": drive} if drive is not None else {}))
