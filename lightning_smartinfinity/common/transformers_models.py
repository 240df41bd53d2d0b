"""Finds the models of transformers inside a module, and describes them by plain values."""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch

from lightning_smartinfinity.errors import ConfigError

__all__ = ["Model", "ModelDescription", "describe", "describe_models", "models_in", "optional_package"]

Model = Any
"""A ``transformers.PreTrainedModel``; transformers is an optional dependency."""


@dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """The facts of a transformers model that an export needs.

    Args:
        module: Name of the Python module that defines the model's class.
        name: Name of the class.
        config: The model's configuration as the text of config.json.
        generation_config: Its generation settings as the text of generation_config.json; None if it has none.
        origin: The path or name from which it was loaded; may be empty.
    """

    module: str
    name: str
    config: str
    generation_config: str | None = None
    origin: str = ""


def optional_package(name: str, *, purpose: str) -> Any:
    """Import a package of the extra ``huggingface``.

    Args:
        name: Name of the package.
        purpose: The feature that needs it, as the beginning of a sentence.

    Raises:
        ConfigError: The package cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {name}, which cannot be imported: {error}.",
            "Install it, in the checkout of this package: pip install '.[huggingface]'.",
        ) from error


def models_in(module: torch.nn.Module) -> dict[str, Model]:
    """Return the transformers models in a module by name, except models inside other models."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:  # then no such model can exist
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
    """Return a module's description for its checkpoints, in plain types: its models and the names of frozen weights."""
    descriptions: dict[str, dict[str, object]] = {}
    for name, model in models_in(module).items():
        # A failure here must not cost the checkpoint: without a description it can be exported with --model.
        with suppress(TypeError, ValueError, AttributeError):
            descriptions[name] = asdict(describe(model))
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    return {"models": descriptions, "frozen": frozen}
