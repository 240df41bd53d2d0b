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


def optional_package(name: str, *, purpose: str) -> Any:
    """Return a package of the extra ``huggingface``.

    Args:
        name: Its name.
        purpose: What needs it, as the beginning of a sentence.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs {name}, which cannot be imported: {error}.",
            "Install it, in the checkout of this package: pip install '.[huggingface]'.",
        ) from error


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
