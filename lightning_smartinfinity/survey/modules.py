"""Looks at the module of a training, before it is built where ``configure_model`` builds it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.plan.model import ModelFigures
from lightning_smartinfinity.store.os_errors import in_short
from lightning_smartinfinity.survey.models import ModelSource, survey_model, with_transformer, without_weights
from lightning_smartinfinity.survey.passes import transformer_in

__all__ = ["is_built", "survey_module"]


def is_built(module: nn.Module) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(), None) is not None


def survey_module(module: nn.Module, *, batch: int, seq: int, in_16_bit: bool) -> ModelFigures:
    """Count a module's parameters, and what a forward and backward take if a model of transformers is inside.

    A module without parameters is built once more, on fake tensors: its ``configure_model`` runs on a copy.

    Args:
        module: The module. Its parameters may be partitioned.
        batch: Sequences of a micro-batch.
        seq: Tokens of a sequence.
        in_16_bit: Whether parameters will be bf16 or fp16.

    Raises:
        UnsupportedError: It cannot be built on fake tensors.
    """
    name = type(module).__name__
    if is_built(module):
        return _of_built(name, module, batch=batch, seq=seq, in_16_bit=in_16_bit)
    try:
        return survey_model(
            ModelSource(name=name, build=lambda: _configured(module)), batch=batch, seq=seq, in_16_bit=in_16_bit
        )
    except Exception as error:  # whatever the user's own code raises on tensors without values
        raise UnsupportedError(
            f"plan='auto' cannot look at {name} before it is built: {in_short(error)}.",
            "Name the model: plan={'model': 'folder, package.module:Class or 7B'}.",
        ) from error


def _configured(module: nn.Module) -> nn.Module:
    """Return a copy of a module on which ``configure_model`` was called. Parts that it has already are shared."""
    twin: Any = copy.copy(module)
    twin.__dict__ = {**module.__dict__, "_modules": dict(module._modules), "_parameters": dict(module._parameters)}
    with without_weights():
        twin.configure_model()
    return twin  # type: ignore[no-any-return]


def _of_built(name: str, module: nn.Module, *, batch: int, seq: int, in_16_bit: bool) -> ModelFigures:
    def numel(param: nn.Parameter) -> int:
        return int(getattr(param, "ds_numel", param.numel()))

    figures = ModelFigures(
        name=name,
        trained=tuple(numel(param) for param in module.parameters() if param.requires_grad),
        frozen=tuple(numel(param) for param in module.parameters() if not param.requires_grad),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        largest_module=max(sum(map(numel, each.parameters(recurse=False))) for each in module.modules()),
        assumed="activations and time were not counted: the module holds no model of transformers, or several",
    )
    model = transformer_in(module)
    if model is None:
        return figures
    source = with_transformer(ModelSource(name=name, build=lambda: module))
    whole = survey_model(source, batch=batch, seq=seq, in_16_bit=in_16_bit)
    return replace(
        whole,
        trained=figures.trained,
        frozen=figures.frozen,
        buffer_bytes=figures.buffer_bytes,
        largest_module=figures.largest_module,
    )
