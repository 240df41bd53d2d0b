"""Finds the models of transformers inside a module, and describes them in checkpoints by plain values."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lightning_smartinfinity.errors import CheckpointError, ConfigError, UnsupportedError
from lightning_smartinfinity.store.os_errors import in_short

__all__ = [
    "Model",
    "ModelDescription",
    "choose",
    "describe",
    "describe_models",
    "described_by",
    "described_in",
    "models_in",
    "require_transformers",
    "without_memory",
]

Model = Any
"""A ``transformers.PreTrainedModel``; transformers is an optional dependency."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """Says what an export has to know of a model of transformers.

    Args:
        module: Name of the Python module that defines its class.
        name: Name of the class.
        config: Its configuration as the text of config.json.
        generation_config: Its settings for generation as the text of generation_config.json; None if it has none.
        origin: The path or name from which it was loaded; may be empty.
    """

    module: str
    name: str
    config: str
    generation_config: str | None = None
    origin: str = ""


def require_transformers() -> ModuleType:
    """Return transformers.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"Exporting a model of transformers needs transformers, which cannot be imported: {error}.",
            "Install it: pip install 'lightning-smartinfinity[huggingface]'.",
        ) from error
    return transformers


def models_in(module: torch.nn.Module) -> dict[str, Model]:
    """Return the models of transformers in a module by name, without those that are parts of others."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then there can be no such model
        return {}
    found: dict[str, Model] = {}
    for name, child in module.named_modules():
        inside = any(outer == "" or name.startswith(f"{outer}.") for outer in found)
        if not inside and isinstance(child, modeling.PreTrainedModel):
            found[name] = child
    return found


def describe(model: Model) -> ModelDescription:
    """Describe a model."""
    origin = str(getattr(model.config, "name_or_path", "") or "")
    generates = model.can_generate() and model.generation_config is not None
    return ModelDescription(
        module=type(model).__module__,
        name=type(model).__name__,
        config=model.config.to_json_string(use_diff=True),
        generation_config=model.generation_config.to_json_string(use_diff=True) if generates else None,
        origin=os.path.abspath(origin) if os.path.isdir(origin) else origin,
    )


def describe_models(module: torch.nn.Module) -> dict[str, Any]:
    """Describe a module for its checkpoints, in types that every reader knows: its models, and what is not trained."""
    descriptions: dict[str, dict[str, object]] = {}
    for name, model in models_in(module).items():
        # A model that cannot be described is no reason to lose a checkpoint: it can be exported with --model.
        with suppress(TypeError, ValueError, AttributeError):
            descriptions[name] = asdict(describe(model))
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    return {"models": descriptions, "frozen": frozen}


def described_in(saved: Mapping[str, Any] | None) -> dict[str, ModelDescription]:
    """Return the descriptions that :func:`describe_models` has made; none if a checkpoint holds nothing of the kind."""
    models = {} if saved is None else saved["models"]
    return {name: ModelDescription(**fields) for name, fields in models.items()}


def described_by(folder: Path) -> ModelDescription:
    """Describe the model in a folder of transformers.

    Raises:
        CheckpointError: The folder has no usable config.json.
    """
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
    return ModelDescription(module="transformers", name=names[0], config=text, origin=str(folder))


def choose(names: Mapping[str, object], wanted: str | None, *, option: str) -> str | None:
    """Return the name of the model to export; None if there is none.

    Args:
        names: The models by name.
        wanted: The name that the user asked for, or None.
        option: How the user can ask for one.

    Raises:
        ConfigError: There are several, or none has the wanted name.
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
    transformers = require_transformers()
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
    except Exception as error:  # whatever a model's own code raises on values it does not know, or without memory
        raise UnsupportedError(
            f"{description.name} cannot be built from its configuration without memory: {in_short(error)}.",
            "Call strategy.save_pretrained(folder) in the training, where the model exists.",
        ) from error
