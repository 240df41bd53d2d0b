"""Partitioned parameters are read and copied as in memory; saving, pickling and sharing their memory is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import safetensors.torch
import torch
from deepspeed.runtime.zero.partition_parameters import is_zero_param
from torch import nn

from lightning_smartinfinity import SmartInfinityStrategy, UnsupportedError
from tests.fabric.worker import quiet_fabric
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit

REMEDY = r"save_pretrained\(folder\), a method of the strategy.*smart-infinity export"
# Nothing stays gathered, as in a model of real size.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LitTiny:
    """Train a small model of which no parameter stays whole."""
    root = tmp_path_factory.mktemp("trained")
    module = LitTiny(Recipe())
    fit(module, root, SmartInfinityStrategy(root / "storage", zero=NOTHING_PERSISTS))
    return module


def weight_of(module: LitTiny) -> nn.Parameter:
    return module.model.head.weight


REFUSED: dict[str, Callable[[LitTiny], object]] = {
    "torch.save(state_dict)": lambda module: torch.save(module.state_dict(), io.BytesIO()),
    "torch.save(parameters)": lambda module: torch.save(list(module.parameters()), io.BytesIO()),
    "torch.save(parameter.data)": lambda module: torch.save(weight_of(module).data, io.BytesIO()),
    "pickle.dumps(parameter)": lambda module: pickle.dumps(weight_of(module)),
    "pickle.dumps(state_dict)": lambda module: pickle.dumps(module.state_dict()),
    "pickle.dumps(module)": lambda module: pickle.dumps(module.model.head),
    "torch.save(module)": lambda module: torch.save(module.model.head, io.BytesIO()),
    "a process that is spawned": lambda module: ForkingPickler.dumps(weight_of(module)),
    "state_dict(keep_vars=True)": lambda module: torch.save(module.state_dict(keep_vars=True), io.BytesIO()),
    "safetensors": lambda module: safetensors.torch.save(module.state_dict()),
    "np.from_dlpack": lambda module: np.from_dlpack(module.state_dict()["model.head.weight"]),
    "np.from_dlpack of a parameter": lambda module: np.from_dlpack(weight_of(module)),
    "data_ptr": lambda module: weight_of(module).data_ptr(),
    "share_memory_": lambda module: weight_of(module).share_memory_(),
}
"""What would need memory of the parameter's own."""


@pytest.mark.parametrize("how", REFUSED)
def test_saving_pickling_or_sharing_a_partitioned_parameter(how: str, trained: LitTiny) -> None:
    """It raises, and the error says how to export the model."""
    with pytest.raises(UnsupportedError, match=REMEDY):
        REFUSED[how](trained)


def test_an_array_of_a_partitioned_parameter_is_not_writeable(tmp_path: Path) -> None:
    """A write to it would be lost, so numpy refuses it, before any engine exists. Nor can the layer be pickled."""
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    with fabric.init_module():
        layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.detach().numpy()[0] = 0
    for value in (layer.weight, layer.state_dict()):
        with pytest.raises(UnsupportedError, match=REMEDY):
            pickle.dumps(value)
    fabric.strategy.close()


def test_a_copied_module_is_partitioned_and_trains_no_more(trained: LitTiny) -> None:
    """copy.deepcopy gives other parameters of the same values in 16 bit, which answer; the original stays."""
    copied = copy.deepcopy(trained.model)
    for own, other in zip(copied.parameters(), trained.model.parameters(), strict=True):
        assert own is not other and hasattr(own, "ds_id") and own.ds_id != other.ds_id  # type: ignore[attr-defined]
        assert torch.equal(own.detach().bfloat16(), other.detach().clone().bfloat16())
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with torch.no_grad():
        expected = trained.model(tokens).clone()
        assert torch.equal(copied(tokens), expected)
        copied.head.weight.zero_()  # type: ignore[union-attr, operator]
        assert torch.equal(trained.model(tokens), expected)


# Ways in which a class may be pickled: as a call of itself, or with a state that is no dict.
STATES: dict[str, dict[str, Any]] = {
    "rebuilt": {"__reduce__": lambda self: (type(self), (self.in_features, self.out_features))},
    "a tuple": {
        "__getstate__": lambda self: (self.weight, self.bias),
        "__setstate__": lambda self, state: rebuild(self, *state),
    },
}


def rebuild(module: nn.Linear, weight: nn.Parameter, bias: nn.Parameter) -> None:
    nn.Linear.__init__(module, *reversed(weight.shape))
    module.weight, module.bias = weight, bias


@pytest.mark.parametrize("kind", STATES)
def test_a_module_with_its_own_pickling_is_copied(kind: str, tmp_path: Path) -> None:
    """copy.deepcopy and copy.copy do what the class says, and the module answers as before."""
    owned = type("Owned", (nn.Linear,), STATES[kind])
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    layer: Any = owned(8, 4)
    expected = layer.weight.detach().clone()
    fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    for copied in (copy.deepcopy(layer), copy.copy(layer)):
        assert type(copied) is owned and copied.weight.shape == (4, 8)
        assert (kind == "rebuilt") != torch.equal(copied.weight, expected)
        assert copied(torch.ones(2, 8)).shape == (2, 4)
    assert torch.equal(layer.weight, expected)
    copy.deepcopy(nn.Sequential(layer))
    fabric.strategy.close()


@pytest.mark.seam("moves_module: nothing is gathered", "torch.nn.Module._apply calls functions from its module.")
def test_moving_a_module_keeps_its_parameters(trained: LitTiny) -> None:
    """Module.to and its like leave parameters that ZeRO-3 still knows, which GatheredParameters still gathers."""
    model = trained.model
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = weight_of(trained).detach().clone()
    for moved in (model.cpu(), model.to("cpu"), model.bfloat16()):
        assert all(isinstance(param, nn.Parameter) and is_zero_param(param) for param in moved.parameters())
    with pytest.raises(UnsupportedError, match=r"torch.bfloat16 into torch.float64.*precision"):
        model.double()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        assert torch.equal(weight_of(trained), expected)


def test_gathered_parameters_are_saved_and_copied(trained: LitTiny) -> None:
    """Within GatheredParameters a saved, pickled or copied model has the weights, as usual."""
    file = io.BytesIO()
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        expected = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
        copied = copy.deepcopy(trained.model)
        torch.save(trained.model.state_dict(), file)
        assert torch.equal(pickle.loads(ForkingPickler.dumps(weight_of(trained))), weight_of(trained))
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, value in expected.items():
        assert value.numel() and torch.equal(copied.get_parameter(name), value) and torch.equal(saved[name], value)
    torch.save(copied.state_dict(), io.BytesIO())
    copy.deepcopy(copied)
