"""Chooses the model of transformers to export, and builds it from its description without memory for weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity.common.transformers_models import Model, ModelDescription, optional_package
from lightning_smartinfinity.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_smartinfinity.storage.io.os_errors import in_short
from lightning_smartinfinity.zero3.checkpoints.formats.trust import require_file

__all__ = ["choose", "described_by", "described_in", "without_memory"]


def described_in(saved: Mapping[str, Any] | None) -> dict[str, ModelDescription]:
    """Return the descriptions that ``describe_models`` made, by name; empty if a checkpoint has none."""
    models = {} if saved is None else saved["models"]
    return {name: ModelDescription(**fields) for name, fields in models.items()}


def described_by(folder: Path) -> ModelDescription:
    """Describe the model in a folder of transformers.

    Raises:
        CheckpointError: The folder has no usable config.json.
    """
    require_file(folder / "config.json")
    try:
        text = (folder / "config.json").read_text()
        names: list[str] = json.loads(text).get("architectures") or []
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} holds no readable config.json: {error}.", "Pass the folder of a model of transformers."
        ) from error
    if len(names) != 1:
        raise CheckpointError(
            f"{folder / 'config.json'} names {len(names)} architectures.", "Name the model's class there, as one."
        )
    return ModelDescription(module="transformers", name=names[0], config=text)


def choose(names: Mapping[str, object], wanted: str | None, *, option: str) -> str | None:
    """Return the name of the model to export; None if there is none.

    Args:
        names: The models by name.
        wanted: The name that the user asked for, or None.
        option: The option or argument by which the user can choose one, for messages.

    Raises:
        ConfigError: There are several models and no wanted name, or no model has the wanted name.
    """
    shown = ", ".join(f"{name or '(the module itself)'!r}" for name in names) or "none"
    if wanted is not None and wanted not in names:
        raise ConfigError(f"There is no model of transformers named {wanted!r}; there are: {shown}.", "Name one.")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"The module holds several models of transformers: {shown}.", f"Choose one by {option}.")
    return wanted if wanted is not None else next(iter(names), None)


def without_memory(description: ModelDescription) -> Model:
    """Build a described model without memory for its weights.

    Raises:
        ConfigError: transformers is not installed.
        UnsupportedError: The model needs code that is not part of transformers, or cannot be built without memory.
    """
    transformers = optional_package("transformers", purpose="Exporting a model of transformers")
    kind = getattr(transformers, description.name, None)
    if kind is None or description.module.partition(".")[0] != "transformers":
        raise UnsupportedError(
            f"The class {description.module}.{description.name} is not part of transformers, and an export runs no "
            "code of a checkpoint.",
            "Call strategy.save_pretrained(folder) in the training, where the model exists.",
        )
    try:
        config = kind.config_class.from_dict(json.loads(description.config))
        with torch.device("meta"):
            return kind(config)
    except Exception as error:  # a model's code may raise anything for unknown values, or without memory
        raise UnsupportedError(
            f"{description.name} cannot be built from its configuration without memory: {in_short(error)}.",
            "Call strategy.save_pretrained(folder) in the training, where the model exists.",
        ) from error
