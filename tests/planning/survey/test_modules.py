"""A module is looked at before it is built, and does not change by that."""

from __future__ import annotations

import random
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.planning.survey.modules import survey_module

transformers = pytest.importorskip("transformers")


def numel_of(module: nn.Module) -> int:
    return survey_module(module, batch=1, seq=8, in_16_bit=False).numel


class Appending(pl.LightningModule):
    """Builds into a list that is there, unless that was done."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.log_of_calls: list[str] = []

    def configure_model(self) -> None:
        self.log_of_calls.append("called")
        if len(self.layers) == 0:
            self.layers.extend(nn.Linear(8, 8) for _ in range(3))
            self.register_buffer("mask", torch.ones(4))
            self.drawn = random.random(), float(np.random.rand())


class Nesting(pl.LightningModule):
    """Has a module inside that it configures."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Appending()

    def configure_model(self) -> None:
        self.inner.configure_model()


@pytest.mark.parametrize("make", [Appending, Nesting])
def test_the_module_does_not_change(make: type[Any]) -> None:
    """Neither it nor a module inside has parameters, buffers or entries of lists that it had not before."""
    module = make()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert numel_of(module) == 3 * 72
    inner = module.inner if make is Nesting else module
    assert (len(inner.layers), inner.log_of_calls) == (0, [])
    assert not hasattr(inner, "mask")
    assert not any(isinstance(tensor, FakeTensor) for tensor in (*module.parameters(), *module.buffers()))
    module.configure_model()
    random.seed(1)
    np.random.seed(1)
    assert inner.drawn == (random.random(), float(np.random.rand()))
    assert sum(param.numel() for param in module.parameters()) == 3 * 72


class Growing(Appending):
    """Has a parameter before it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def test_what_configure_model_adds_counts() -> None:
    """A module that has parameters already is built on a copy as well, and its own tensors stay its own."""
    module = Growing()
    assert numel_of(module) == 3 * 72 + 1
    assert torch.equal(module.scale, torch.ones(1)) and not isinstance(module.scale, FakeTensor)
    module.configure_model()
    assert numel_of(module) == 3 * 72 + 1


def test_a_module_that_trains_nothing() -> None:
    """The error says so, and does not ask for a name."""
    with pytest.raises(ConfigError, match="no parameter to train"):
        numel_of(pl.LightningModule())


class Subclass(transformers.LlamaForCausalLM):  # type: ignore[misc, name-defined]
    """A model with a constructor of its own."""

    def __init__(self, config: Any, extra: int) -> None:
        super().__init__(config)
        self.extra = extra


class Holding(pl.LightningModule):
    """Holds a model of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


@pytest.fixture
def config() -> Any:
    return transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )


def test_a_model_of_transformers_that_exists(config: Any) -> None:
    """Its passes are counted, its activation checkpoints are seen, and its configuration stays as it is."""
    model = transformers.LlamaForCausalLM(config)
    plain = survey_module(Holding(model), batch=1, seq=8, in_16_bit=False)
    assert plain.passes is not None and not plain.checkpointing
    model.gradient_checkpointing_enable()
    assert survey_module(Holding(model), batch=1, seq=8, in_16_bit=False).checkpointing
    assert model.config.use_cache is True


def test_a_model_that_cannot_be_built_anew(config: Any) -> None:
    """A subclass with another constructor is planned by its sizes, and the figures say what was not counted."""
    model = Subclass(config, 3)
    figures = survey_module(Holding(model), batch=1, seq=8, in_16_bit=False)
    assert figures.numel == sum(param.numel() for param in model.parameters())
    assert figures.passes is None and "not counted" in figures.assumed
