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
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from tests.fabric.worker import quiet_fabric
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit, quiet_trainer

REMEDY = r"save_pretrained\(folder\), a method of the strategy.*smart-infinity export"
# Nothing stays gathered, as in a model of real size.
NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LitTiny:
    """Train a small model of which no parameter stays whole."""
    from lightning_smartinfinity import SmartInfinityStrategy

    root = tmp_path_factory.mktemp("trained")
    module = LitTiny(Recipe())
    fit(module, root, SmartInfinityStrategy(root / "storage", zero=NOTHING_PERSISTS))
    return module


def weight_of(module: LitTiny) -> nn.Parameter:
    return module.model.head.weight


def save_by_safetensors(module: LitTiny) -> None:
    from safetensors.torch import save

    save(module.state_dict())


REFUSED: dict[str, Callable[[LitTiny], object]] = {
    "torch.save(state_dict)": lambda module: torch.save(module.state_dict(), io.BytesIO()),
    "torch.save(parameters)": lambda module: torch.save(list(module.parameters()), io.BytesIO()),
    "torch.save(parameter.data)": lambda module: torch.save(weight_of(module).data, io.BytesIO()),
    "pickle.dumps(parameter)": lambda module: pickle.dumps(weight_of(module)),
    "pickle.dumps(state_dict)": lambda module: pickle.dumps(module.state_dict()),
    "a process that is spawned": lambda module: ForkingPickler.dumps(weight_of(module)),
    "state_dict(keep_vars=True)": lambda module: torch.save(module.state_dict(keep_vars=True), io.BytesIO()),
    "safetensors": save_by_safetensors,
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


READS: dict[str, Callable[[nn.Parameter], Any]] = {
    "detach, cpu, clone": lambda weight: weight.detach().cpu().clone(),
    "deepcopy of detach": lambda weight: copy.deepcopy(weight.detach()),
    "numpy": lambda weight: torch.tensor(weight.detach().float().numpy()),
    "asarray": lambda weight: torch.tensor(np.asarray(weight.detach().float())),
    "tolist": lambda weight: torch.tensor(weight.tolist()),
    "to": lambda weight: weight.detach().to(torch.float64),
    "a state dict on the CPU, saved": lambda weight: saved_and_loaded({"weight": weight.data.cpu()})["weight"],
    "saved and loaded": lambda weight: saved_and_loaded(weight.detach().clone()),
}


def saved_and_loaded(value: object) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("how", READS)
def test_reading_a_partitioned_parameter(how: str, trained: LitTiny) -> None:
    """Copies have its values: in a mixed precision those of the masters, which the gathered ones round."""
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        expected = weight_of(trained).detach().clone()
    assert torch.equal(READS[how](weight_of(trained)).to(expected.dtype), expected)


def test_an_array_of_a_partitioned_parameter_is_not_writeable(tmp_path: Path) -> None:
    """A write to it would be lost, so numpy refuses it."""
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    with fabric.init_module():
        layer = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="read-only"):
        layer.weight.detach().numpy()[0] = 0
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


def test_a_shallow_copy_shares_the_parameters(trained: LitTiny) -> None:
    """copy.copy is no pickling."""
    copied = copy.copy(trained.model.head)
    assert copied.weight is trained.model.head.weight


class Rebuilt(nn.Linear):
    """Is pickled as a call of its class."""

    def __reduce__(self) -> Any:
        return type(self), (self.in_features, self.out_features)


class WithTuple(nn.Linear):
    """Has a state that is no dict."""

    def __getstate__(self) -> Any:
        return self.weight, self.bias

    def __setstate__(self, state: Any) -> None:
        nn.Linear.__init__(self, *reversed(state[0].shape))
        self.weight, self.bias = state


class WithoutHooks(nn.Linear):
    """Has a state of its parameters alone."""

    def __getstate__(self) -> Any:
        return {"weight": self.weight, "bias": self.bias}

    def __setstate__(self, state: Any) -> None:
        nn.Linear.__init__(self, *reversed(state["weight"].shape))
        vars(self)["_parameters"].update(state)


@pytest.mark.parametrize("kind", [Rebuilt, WithTuple, WithoutHooks])
def test_a_module_with_its_own_pickling_is_copied(kind: type[nn.Linear], tmp_path: Path) -> None:
    """copy.deepcopy and copy.copy do what the class says, and the module answers as before."""
    fabric = quiet_fabric(tmp_path / "storage", precision="32-true")
    layer = kind(8, 4)
    expected = layer.weight.detach().clone()
    fabric.setup(layer, torch.optim.AdamW(layer.parameters()))
    for copied in (copy.deepcopy(layer), copy.copy(layer)):
        assert type(copied) is kind and copied.weight.shape == (4, 8)
        assert (kind is Rebuilt) != torch.equal(copied.weight, expected)
        assert copied(torch.ones(2, 8)).shape == (2, 4)
    assert torch.equal(layer.weight, expected)
    copy.deepcopy(nn.Sequential(layer))
    fabric.strategy.close()


@pytest.mark.parametrize("dump", [pickle.dumps, ForkingPickler.dumps, lambda module: torch.save(module, io.BytesIO())])
def test_a_whole_module_is_pickled(dump: Callable[[nn.Module], object], trained: LitTiny) -> None:
    """Pickling it raises, either by this package's guard or because a hook of DeepSpeed cannot be pickled."""
    with pytest.raises((UnsupportedError, AttributeError)):
        dump(trained.model)
    with pytest.raises(UnsupportedError, match=REMEDY):
        dump(trained.model.head)


@pytest.mark.seam("moves_module: nothing is gathered", "torch.nn.Module._apply calls functions from its module.")
def test_moving_a_module_keeps_its_parameters(trained: LitTiny) -> None:
    """Module.to and its like leave parameters that ZeRO-3 still knows, which GatheredParameters still gathers."""
    from deepspeed.runtime.zero.partition_parameters import is_zero_param

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
    """Within GatheredParameters a saved or copied model has the weights, as usual."""
    with deepspeed.zero.GatheredParameters(list(trained.parameters())):
        expected = {name: param.detach().clone() for name, param in trained.model.named_parameters()}
        copied = copy.deepcopy(trained.model)
        file = io.BytesIO()
        torch.save(trained.model.state_dict(), file)
        reloaded = pickle.loads(ForkingPickler.dumps(weight_of(trained)))
        assert torch.equal(reloaded, expected["head.weight"] if "head.weight" in expected else weight_of(trained))
    assert all(value.numel() for value in expected.values())
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    for name, value in expected.items():
        assert torch.equal(dict(copied.named_parameters())[name], value)
        assert torch.equal(saved[name], value)
    assert copied.state_dict().keys() == saved.keys()
    torch.save(copied.state_dict(), io.BytesIO())
    copy.deepcopy(copied)


def test_a_model_that_is_being_built_refuses_too(tmp_path: Path) -> None:
    """Under zero.Init a layer that is built already cannot be pickled either, before any engine exists."""
    fabric = quiet_fabric(tmp_path / "storage")
    with fabric.init_module():
        layer = nn.Linear(8, 8)
    with pytest.raises(UnsupportedError, match=REMEDY):
        pickle.dumps(layer.weight)
    with pytest.raises(UnsupportedError, match=REMEDY):
        pickle.dumps(layer.state_dict())
    fabric.strategy.close()


def test_a_fitted_model_in_a_plain_trainer(trained: LitTiny, tmp_path: Path) -> None:
    """Saving it by another strategy raises instead of writing empty weights."""
    trainer = quiet_trainer(tmp_path, "auto", precision="32-true", barebones=False)
    trainer.strategy.connect(trained)
    with pytest.raises(UnsupportedError, match=REMEDY):
        trainer.save_checkpoint(tmp_path / "lost.ckpt")


@RunIf(package="transformers")
@pytest.mark.parametrize("gathered", [False, True])
def test_save_pretrained_of_transformers(gathered: bool, tmp_path: Path) -> None:
    """It raises on partitioned weights, and writes the model within GatheredParameters."""
    from transformers import GPT2LMHeadModel

    from tests.training.transformers_worker import BuiltOnTokens, construct

    module: Any = BuiltOnTokens(lambda: construct("gpt2"))
    from lightning_smartinfinity import SmartInfinityStrategy

    fit(module, tmp_path, SmartInfinityStrategy(tmp_path / "storage", zero=NOTHING_PERSISTS))
    if not gathered:
        with pytest.raises(UnsupportedError, match=REMEDY):
            module.model.save_pretrained(tmp_path / "out")
        return
    with deepspeed.zero.GatheredParameters(list(module.model.parameters())):
        module.model.save_pretrained(tmp_path / "out")
        expected = {name: param.detach().clone() for name, param in module.model.named_parameters()}
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert expected
    for name, param in again.named_parameters():
        assert torch.equal(param, expected[name])


def test_checkpoints_are_saved_and_loaded(tmp_path: Path) -> None:
    """DeepSpeed's engine saves a state dict of placeholders and loads it, by the Trainer and by Fabric."""
    from lightning_smartinfinity import SmartInfinityStrategy

    strategy = SmartInfinityStrategy(tmp_path / "storage", zero=NOTHING_PERSISTS)
    module = LitTiny(Recipe())
    trainer = fit(module, tmp_path, strategy)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        expected = {name: param.detach().clone() for name, param in module.named_parameters()}
    other = LitTiny(Recipe(lr=0.0))
    again = quiet_trainer(tmp_path, SmartInfinityStrategy(tmp_path / "other", zero=NOTHING_PERSISTS), max_steps=3)
    again.fit(other, ckpt_path=tmp_path / "a.ckpt")
    with deepspeed.zero.GatheredParameters(list(other.parameters())):
        assert all(torch.equal(param, expected[name]) for name, param in other.named_parameters())


def test_sixteen_bit_model_of_deepspeed(tmp_path: Path) -> None:
    """DeepSpeed's own collection of the whole weights works as before."""
    settings = NOTHING_PERSISTS | {"stage3_gather_16bit_weights_on_model_save": True}
    fabric = quiet_fabric(tmp_path / "storage", options={"zero": settings})
    net = nn.Linear(8, 4)
    expected = net.weight.detach().clone()
    model, _ = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    model._forward_module.save_16bit_model(str(tmp_path / "whole"), "weights.pt")
    saved = torch.load(tmp_path / "whole" / "weights.pt", weights_only=True)
    assert torch.equal(saved["weight"], expected.to(saved["weight"].dtype))
    fabric.strategy.close()


@RunIf(package="peft")
def test_adapters_of_peft(tmp_path: Path) -> None:
    """get_peft_model_state_dict has the gathered adapters, and nothing of the partitioned base model."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from lightning_smartinfinity import SmartInfinityStrategy
    from tests.training.transformers_worker import BuiltOnTokens, construct

    config = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM")
    module: Any = BuiltOnTokens(lambda: get_peft_model(construct("gpt2"), config))  # type: ignore[arg-type]
    fit(module, tmp_path, SmartInfinityStrategy(tmp_path / "storage", zero=NOTHING_PERSISTS))
    adapters = {name: param for name, param in module.model.named_parameters() if "lora_" in name}
    with deepspeed.zero.GatheredParameters(list(adapters.values())):
        state = get_peft_model_state_dict(module.model)
        torch.save(state, tmp_path / "adapters.pt")
        expected = {name.replace(".default", ""): param.detach().clone() for name, param in adapters.items()}
    saved = torch.load(tmp_path / "adapters.pt", weights_only=True)
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], value) and value.numel() for name, value in expected.items())
    with pytest.raises(UnsupportedError, match=REMEDY):
        torch.save(get_peft_model_state_dict(module.model), tmp_path / "lost.pt")
