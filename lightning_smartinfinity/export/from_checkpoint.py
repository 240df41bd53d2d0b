"""Exports the weights of a checkpoint folder in a single process."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lightning_smartinfinity.common.transformers_models import Model, ModelDescription
from lightning_smartinfinity.errors import CheckpointError, ConfigError
from lightning_smartinfinity.export.companions import CheckpointOrigin, Origin, has_tokenizer, origin_of
from lightning_smartinfinity.export.destination import require_outside, require_unused, resolved
from lightning_smartinfinity.export.lightning_file import write_lightning_file
from lightning_smartinfinity.export.models import choose, described_by, described_in, without_memory
from lightning_smartinfinity.export.pretrained import FolderExport, plain_export, pretrained_export, writing_folder
from lightning_smartinfinity.export.routes import DTYPES
from lightning_smartinfinity.export.shards import SHARD_SIZE
from lightning_smartinfinity.settings.rules import Rule, one_of, optional, require
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_weights import CheckpointWeights
from lightning_smartinfinity.zero3.checkpoints.formats.trust import loading_policy
from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import Contents, SubmoduleWeights

__all__ = ["FORMATS", "ExportSettings", "export_checkpoint"]

FORMATS = ("safetensors", "lightning")
"""Formats of an export."""

_FOLDER = Rule("Pass the folder of the model before it was trained", os.path.isdir, "is no folder")


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Settings of an export.

    Args:
        to: ``"safetensors"`` for a folder; ``"lightning"`` for one file that ``load_from_checkpoint`` loads.
        model: Folder of the model of transformers before it was trained, with its tokenizer and configuration.
        submodule: Name of the model in the module, if there are several.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"`` for trained weights. The default is the dtype of training for
            transformers, and ``"fp32"``, the unchanged master weights, for Lightning.
        max_shard_size: Largest size of a file, such as ``"5GB"``. The default is that of transformers.
        weights_only: Whether the checkpoint may hold only tensors, numbers, text and containers of them. Use False only
            for checkpoints that you trust: loading other types runs code that a file names.

    Raises:
        ConfigError: A setting is unknown, out of range, or does not apply to the format.
    """

    to: str = "safetensors"
    model: Path | None = None
    submodule: str | None = None
    dtype: str | None = None
    max_shard_size: str | None = None
    weights_only: bool = True

    def __post_init__(self) -> None:
        require(self, "an export", to=one_of(*FORMATS))
        if self.dtype is not None:
            require(self, "an export", dtype=one_of(*DTYPES))
        require(self, "an export", max_shard_size=optional(SHARD_SIZE), model=optional(_FOLDER))
        for name in ("model", "submodule", "max_shard_size"):
            if self.to == "lightning" and getattr(self, name) is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} does not apply to --to lightning, which writes the whole module to "
                    "one file.",
                    "Leave it out, or export --to safetensors.",
                )


def export_checkpoint(checkpoint: Path, target: Path, settings: ExportSettings) -> list[str]:
    """Export the weights of a checkpoint, which does not change. The result is complete or absent.

    Args:
        checkpoint: The folder that this strategy or stock DeepSpeed saved with ZeRO-3, or a universal one.
        target: Path of the export, which does not exist or is an empty folder.
        settings: Settings of the export.

    Returns:
        Sentences for the user about the files that were written.

    Raises:
        SmartInfinityError: The checkpoint cannot be read or exported, or the export cannot be written.
    """
    target = resolved(target)
    require_outside(target, checkpoint)
    require_unused(target)
    with loading_policy(settings.weights_only, consent="--no-weights-only (in Python, weights_only=False)"):
        return _exported(checkpoint, target, settings)


def _exported(checkpoint: Path, target: Path, settings: ExportSettings) -> list[str]:
    source = CheckpointWeights(checkpoint)
    if settings.to == "lightning":
        _require_frozen(source)
        plan = write_lightning_file(source, target, dtype=DTYPES[settings.dtype or "fp32"])
        return [f"Wrote {target} for load_from_checkpoint: {plan.nbytes} bytes of weights."]
    chosen = _chosen(source, settings)
    return (
        _export_plain(source, target, settings) if chosen is None else _export_model(*chosen, source, target, settings)
    )


def _export_plain(source: CheckpointWeights, target: Path, settings: ExportSettings) -> list[str]:
    _require_frozen(source)
    export = plain_export(source.contents, dtype=_dtype(settings), max_shard_size=settings.max_shard_size)
    with writing_folder(target, export) as put:
        source.read(export.names, put, masters=True)
    return _told_plain(target, export)


def _export_model(
    name: str,
    description: ModelDescription,
    model: Model,
    source: CheckpointWeights,
    target: Path,
    settings: ExportSettings,
) -> list[str]:
    weights = SubmoduleWeights(source, name)
    named = [] if settings.model is None else [Origin(settings.model)]
    export = pretrained_export(
        model,
        description,
        weights.contents,
        dtype=_dtype(settings),
        origins=[*named, *origin_of(description, CheckpointOrigin)],
        folder=settings.model,
        max_shard_size=settings.max_shard_size,
    )
    with writing_folder(target, export) as put:
        weights.read(export.names, put, masters=True)
    return _told(target, export, name, description)


def _dtype(settings: ExportSettings) -> torch.dtype | None:
    return None if settings.dtype is None else DTYPES[settings.dtype]


def _chosen(source: CheckpointWeights, settings: ExportSettings) -> tuple[str, ModelDescription, Model] | None:
    """Return the name, the description and the model to export; None if neither checkpoint nor settings name one."""
    with reading_checkpoint(source.path):
        described = described_in(source.saved_models)
    name = choose(described, settings.submodule, option="--submodule NAME") if described else None
    if name is not None:
        return name, described[name], without_memory(described[name])
    if settings.model is None:
        if settings.submodule is not None:
            raise ConfigError(
                f"{source.path} does not specify which transformers model {settings.submodule!r} is.",
                "Pass its folder as --model.",
            )
        return None
    description = described_by(settings.model)
    model = without_memory(description)
    return _name_of(model, source.contents, settings.submodule), description, model


def _name_of(model: Model, contents: Contents, wanted: str | None) -> str:
    """Find a model in a module by the names of its weights."""
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    names = [*contents.parameters, *contents.aliases]
    found = Counter(name for each in names for name, end in _splits(each) if end in own)
    fitting = [name for name in found if wanted in (None, name) and _fits(name, names, own)]
    if len(fitting) != 1:
        raise ConfigError(
            f"The checkpoint's weights, {next(iter(names), None)!r} for one, are not those of one "
            f"{type(model).__name__}.",
            "Pass the folder of the model that was trained as --model, and --submodule NAME if the module holds more.",
        )
    return fitting[0]


def _splits(name: str) -> Iterator[tuple[str, str]]:
    """Yield each split of a parameter's name into the name of a module and the rest."""
    parts = name.split(".")
    for length in range(len(parts)):
        yield ".".join(parts[:length]), ".".join(parts[length:])


def _fits(name: str, names: Sequence[str], own: set[str]) -> bool:
    prefix = f"{name}." if name else ""
    return all(each.removeprefix(prefix) in own for each in names if each.startswith(prefix))


def _require_frozen(source: CheckpointWeights) -> None:
    saved = source.saved_models
    with reading_checkpoint(source.path):
        lacks_any = source.lacks_frozen and (saved is None or bool(saved["frozen"]))
    if lacks_any:
        lost = "" if saved is None else f", {saved['frozen'][0]!r} for one"
        raise CheckpointError(
            f"{source.path} was saved without its frozen parameters (exclude_frozen_parameters=True){lost}.",
            "Export a model of transformers --to safetensors with --model FOLDER, which supplies them, or save again "
            "with them.",
        )


def _told(target: Path, export: FolderExport, name: str, description: ModelDescription) -> list[str]:
    dtype = str(export.dtype).removeprefix("torch.")
    told = [
        f"Wrote {target} for from_pretrained: {description.name}"
        f"{f' (the module {name!r})' if name else ''} in {dtype}, {export.plan.nbytes} bytes of weights."
    ]
    if not has_tokenizer(target):
        told.append("It has no tokenizer: none was found. Pass the folder of the model as --model, or copy it there.")
    return told


def _told_plain(target: Path, export: FolderExport) -> list[str]:
    dtype = str(export.dtype).removeprefix("torch.")
    return [
        f"Wrote {target / 'model.safetensors'} in {dtype}, {export.plan.nbytes} bytes of weights.",
        "The checkpoint describes no model of transformers, so the weights have the names of the module. For a folder "
        "that from_pretrained loads, pass the folder of the model as --model.",
    ]
