"""Options of ``smart-infinity plan``."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_smartinfinity.cli.option_types import number_in, reading, storage_folder, whole_number_in
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.planning.needs import least_gradient_budget, least_parameter_budget
from lightning_smartinfinity.planning.training import BLOCK_SCALED, BUILDS, OFFLOADS, OPTIMIZERS, PRECISIONS, Training
from lightning_smartinfinity.settings.rules import Rule, between, num_bytes, optional, positive

if TYPE_CHECKING:
    from lightning_smartinfinity.planning.choice import Resources
    from lightning_smartinfinity.planning.model import ModelFigures

__all__ = ["add_options", "found_here", "given_resources", "require_budgets", "training_of"]

_LEAST_BYTES = 10**6  # "24" most likely means 24GB


def _json_in(text: str) -> object:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return None


_SIZE = replace(
    num_bytes(_LEAST_BYTES), remedy="Pass a size with its unit, such as 24GB, 24GiB or 512MB", fault="is no size"
)
_size = reading(str, _SIZE)
_WORDS = "Pass a size with its unit, such as 24GB, or none"
_SIZE_OR_NONE = replace(optional(_SIZE, "none"), remedy=_WORDS)
_size_or_none = reading(str, _SIZE_OR_NONE)
_cache_size = reading(lambda text: "none" if text == "0" else text, _SIZE_OR_NONE)
_gpus = reading(whole_number_in, between(1, 1024))
_count = reading(whole_number_in, between(1, 10**15))
_checkpoints = reading(
    whole_number_in,
    replace(between(0, 10**6), remedy="Pass how many will be kept; with save_top_k=-1 that is how often it saves"),
)
_compression = reading(
    lambda text: text if text == BLOCK_SCALED else number_in(text), optional(positive(1), BLOCK_SCALED)
)
_arguments = reading(
    _json_in, Rule("""Pass an object such as '{"width": 1024}'""", lambda value: isinstance(value, dict), "is no JSON")
)


# TransferConfig's settings that are budgets, the fields of Training that they set, and their help text.
_BUDGETS = (
    (
        "gradient-bytes",
        "gradient_budget",
        "gradients that a process holds in memory, the others on storage (default: all)",
    ),
    (
        "parameter-bytes",
        "parameter_budget",
        "parameters that a process holds in memory with --offload-param nvme (default: what DeepSpeed reads ahead)",
    ),
    (
        "dram-cache-bytes",
        "cache_bytes",
        "optimizer state that a process keeps in memory, or none (default: what is left, but for a quarter of all)",
    ),
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
    parser.add_argument("--init-args", type=_arguments, metavar="JSON", help="arguments of package.module:Class")
    _add_training(parser.add_argument_group("the training"))
    _add_machine(parser.add_argument_group("the machine; omitted values are looked up on this one"))
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
    add("accumulate-in", "dtype in which their gradients are added", choices=("fp32", "parameters"))
    group.add_argument("--checkpointing", action="store_true", help="activations are computed anew in backward")
    add("precision", "precision of the Trainer", choices=PRECISIONS)
    add("optimizer", "class of torch.optim", choices=tuple(OPTIMIZERS))
    add("state-format", "format of the state on storage", choices=tuple(STATE_FORMATS))
    add("offload-param", "where parameters are stored between uses", choices=OFFLOADS)
    for name, dest, words in _BUDGETS:
        size = _cache_size if dest == "cache_bytes" else _size
        group.add_argument(f"--{name}", dest=dest, type=size, metavar="SIZE", help=words)
    group.add_argument(
        "--compression",
        type=_compression,
        metavar="RATIO",
        help=f"share of the gradients that TopK sends, or {BLOCK_SCALED} (default: all, as they are)",
    )
    add("build", "where the module builds the model", choices=BUILDS)
    group.add_argument(
        "--processes", type=_count, metavar="N", help="processes on each machine (default: one for each GPU)"
    )
    add("nodes", "machines, each as described below", type=_count, metavar="N")
    add("save-top-k", "number of checkpoints that are kept", type=_checkpoints, metavar="N")
    add("tokens", "tokens of the whole training", type=_count, metavar="N")


def _add_machine(group: Any) -> None:
    group.add_argument("--storage", type=storage_folder, default=Path(), help="the storage folder (default: here)")
    group.add_argument(
        "--gpu-memory", type=_size_or_none, metavar="SIZE", help="memory of each GPU, or none if the CPU computes"
    )
    group.add_argument("--gpus", type=_gpus, metavar="N", help="number of GPUs")
    group.add_argument("--host-memory", type=_size, metavar="SIZE", help="memory that all processes may use together")
    group.add_argument("--disk", type=_size, metavar="SIZE", help="free space for state and checkpoints")
    group.add_argument(
        "--drive-size", type=_size, metavar="SIZE", help="size of a drive, for its life (default: its part of --disk)"
    )
    group.add_argument("--cores", type=_count, metavar="N", help="number of CPU cores")
    group.add_argument("--drives", type=_count, default=1, metavar="N", help="drives that share the state (default: 1)")
    group.add_argument("--drive-read", type=_size, metavar="RATE", help="bytes that a drive reads in a second")
    group.add_argument("--drive-write", type=_size, metavar="RATE", help="bytes that a drive writes in a second")
    group.add_argument("--network", type=_size, metavar="RATE", help="bytes that a machine receives in a second")
    group.add_argument(
        "--tbw", type=_count, metavar="TB", help="terabytes that a drive may write (default: 600 for each TB of size)"
    )


def training_of(options: argparse.Namespace, resources: Resources) -> Training:
    """Return the training that the options describe, on the given machine.

    Raises:
        ConfigError: Options contradict each other.
    """
    given = {each.name: getattr(options, each.name) for each in fields(Training) if hasattr(options, each.name)}
    if given["cache_bytes"] in (None, "none"):
        given["cache_bytes"] = 0
    given["processes"] = options.processes or max(1, resources.num_gpus)
    if resources.on_gpu and given["processes"] > resources.num_gpus:
        raise ConfigError(
            f"--processes {given['processes']} need a GPU each, and there are {resources.num_gpus}.",
            f"Pass --gpus {given['processes']} or fewer processes.",
        )
    return Training(**given)


def require_budgets(model: ModelFigures, training: Training, *, on_gpu: bool) -> None:
    """Check that a training's budgets are sufficient for a model.

    Raises:
        ConfigError: A budget is smaller than the bytes in memory at once.
    """
    least = {
        "gradient": least_gradient_budget(model, training),
        "parameter": least_parameter_budget(model, training, on_gpu=on_gpu),
    }
    for name, nbytes in least.items():
        given = getattr(training, f"{name}_budget")
        if given is not None and given < nbytes:
            raise ConfigError(
                f"--{name}-bytes {given}: {nbytes} bytes of {name}s are in memory at once.",
                f"Pass at least {-(-nbytes // 10**6)}MB.",
            )


def found_here(options: argparse.Namespace) -> list[str]:
    """Return, in words, the resources that were looked up on this machine because no option gives them."""
    names = {"GPU memory": "gpu_memory", "host memory": "host_memory", "disk": "disk", "cores": "cores"}
    return [words for words, name in names.items() if getattr(options, name) is None]


def given_resources(found: Resources, options: argparse.Namespace) -> Resources:
    """Return a machine's resources, replaced by the options' values where given.

    Raises:
        ConfigError: Options contradict each other.
    """
    names = {
        "host_memory": options.host_memory,
        "disk": options.disk,
        "cores": options.cores,
        "num_drives": options.drives,
    }
    given: dict[str, Any] = {name: value for name, value in names.items() if value is not None}
    if options.host_memory is not None:
        given["kept_free"] = None
    if options.disk is not None:
        given["storage_is_memory"] = False
    if options.gpu_memory is not None:
        has_gpu = options.gpu_memory != "none"
        given |= {"gpu_memory": options.gpu_memory if has_gpu else None, "num_gpus": int(has_gpu)}
    if options.gpus is not None:
        if given.get("gpu_memory", found.gpu_memory) is None:
            raise ConfigError(
                f"--gpus {options.gpus}: the memory is unknown, as no GPU was found here.", "Pass --gpu-memory 24GB."
            )
        given["num_gpus"] = options.gpus
    drive = options.drive_size or (options.disk // options.drives if options.disk else None)
    return replace(found, **given, **({"drive_bytes": drive} if drive is not None else {}))
