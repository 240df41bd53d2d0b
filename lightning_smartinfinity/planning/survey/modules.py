"""Inspects the module of a training, even before ``configure_model`` has built it."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError
from lightning_smartinfinity.planning.model import ModelFigures
from lightning_smartinfinity.planning.survey.models import (
    ModelSource,
    survey_model,
    turns_checkpoints_on,
    with_transformer,
    without_weights,
)
from lightning_smartinfinity.planning.survey.passes import UNCOUNTED, transformer_in
from lightning_smartinfinity.storage.io.os_errors import in_short

__all__ = ["is_built", "survey_module"]


_OWNERS = ("_trainer", "_fabric")  # of a LightningModule


class _NothingAddedError(Exception):
    """``configure_model`` added no parameter to the existing ones."""


def is_built(module: nn.Module) -> bool:
    """Return whether a module has parameters."""
    return next(module.parameters(), None) is not None


def survey_module(module: nn.Module, *, batch: int, seq: int, in_16_bit: bool) -> ModelFigures:
    """Count a module's parameters, and the passes of a transformers model inside it.

    A ``configure_model`` is run on a copy, on fake tensors. The module itself does not change.

    Args:
        module: The module. Its parameters may be partitioned.
        batch: Sequences of a micro-batch.
        seq: Tokens of a sequence.
        in_16_bit: Whether parameters will be bf16 or fp16.

    Raises:
        ConfigError: The module has no parameter to train.
        UnsupportedError: The module cannot be built on fake tensors.
    """
    name = type(module).__name__
    if not callable(getattr(module, "configure_model", None)):
        return _of_built(name, module, batch=batch, seq=seq, in_16_bit=in_16_bit)
    source = ModelSource(name=name, build=lambda: _configured(module))
    try:
        with _random_state_kept():
            return survey_model(source, batch=batch, seq=seq, in_16_bit=in_16_bit)
    except _NothingAddedError:
        return _of_built(name, module, batch=batch, seq=seq, in_16_bit=in_16_bit)
    except SmartInfinityError:
        raise
    except Exception as error:  # the user's own code may raise anything on tensors without values
        raise UnsupportedError(
            f"plan='auto' cannot look at {name} before it is built: {in_short(error)}.",
            "Name the model: plan={'model': 'folder, package.module:Class or 7B'}.",
        ) from error


def _configured(module: nn.Module) -> nn.Module:
    """Return a copy of a module after ``configure_model``. The copy shares the module's existing tensors."""
    tensors = list(chain(module.parameters(), module.buffers()))
    owners = [(each, name, vars(each)[name]) for each in module.modules() for name in _OWNERS if name in vars(each)]
    known = {id(each): each for each in (*tensors, *(owner for *_, owner in owners))}
    twin: Any = copy.deepcopy(module, known)
    for each, name, owner in owners:  # Lightning omits them from copies
        vars(known[id(each)])[name] = owner
    with without_weights():
        twin.configure_model()
    present = {id(each) for each in tensors}
    if present and all(id(each) in present for each in twin.parameters()):
        raise _NothingAddedError
    return twin  # type: ignore[no-any-return]


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and torch after the body."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _of_built(name: str, module: nn.Module, *, batch: int, seq: int, in_16_bit: bool) -> ModelFigures:
    def numel(param: nn.Parameter) -> int:
        return int(getattr(param, "ds_numel", param.numel()))

    figures = ModelFigures(
        name=name,
        trained=tuple(numel(param) for param in module.parameters() if param.requires_grad),
        frozen=tuple(numel(param) for param in module.parameters() if not param.requires_grad),
        buffer_bytes=sum(buffer.nbytes for buffer in module.buffers()),
        largest_module=max(sum(map(numel, each.parameters(recurse=False))) for each in module.modules()),
        assumed=f"{UNCOUNTED}: the module holds no model of transformers, or several",
    )
    model = transformer_in(module)
    if model is None:
        return figures
    try:
        source = with_transformer(ModelSource(name=name, build=lambda: module))
        whole = survey_model(source, batch=batch, seq=seq, in_16_bit=in_16_bit)
    except Exception as error:  # such as a subclass whose constructor takes other arguments
        return replace(figures, assumed=f"{UNCOUNTED}: {in_short(error)}")
    return replace(
        whole,
        trained=figures.trained,
        frozen=figures.frozen,
        buffer_bytes=figures.buffer_bytes,
        largest_module=figures.largest_module,
        checkpointing=turns_checkpoints_on(model),
    )
