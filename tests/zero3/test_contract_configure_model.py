"""Tests the private seams through which models are built while ZeRO-3 partitions them."""

from __future__ import annotations

import inspect
import os
import re
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init
from torch import nn
from torch.overrides import TorchFunctionMode

from lightning_smartinfinity.zero3.engine.training import SmartInfinityEngine
from lightning_smartinfinity.zero3.parameters.gather_on_use import _OWN_REFERENCES, _is_unused
from lightning_smartinfinity.zero3.parameters.scalars import ScalarsAsBytes, sendable
from lightning_smartinfinity.zero3.parameters.torch_functions import _LEFT
from tests.helpers.runif import RunIf


def test_dtypes_of_new_tensors_are_overridden_by_the_outermost_context() -> None:
    """The tensor_overrides of top_level_context decide, and wrappers start from torch's own functions."""
    assert partition_parameters.top_level_context is None
    source = inspect.getsource(Init._add_tensor_creation_wrappers)
    assert "if DeepSpeedTensorOverride.dtype in self.tensor_overrides:" in source
    assert "torch.empty = zero_wrapper_for_fp_tensor_constructor(_orig_torch_empty," in source
    assert "top_level_context = self" in inspect.getsource(Init.__enter__)


def test_what_init_replaces_in_torch() -> None:
    """It keeps originals under names of its own, which stay; linear stays replaced by the function that we use."""
    patch = inspect.getsource(Init.patch_init_and_builtins)
    assert set(re.findall(r"(\w+)\._old_init = ", patch)) == {"cls"}
    assert set(re.findall(r"(\w+\.(?:_old_|__old_)\w+) = ", patch)) == {
        *("cls._old_init", "cls._old_apply_of_skip_init_hook", "Tensor.__old_new__"),
        *("Module._old_init_subclass", "Module._old_apply"),
    }
    assert set(_LEFT[nn.Module]) == {"__init_subclass__", "_old_init_subclass", "_old_apply"}
    assert "torch.nn.functional.linear = zero3_linear_wrap" in inspect.getsource(Init._enable_mem_efficient_linear)
    assert "linear" not in inspect.getsource(Init.unpatch_init_and_builtins)
    assert partition_parameters.zero_init_context == 0
    assert nn.Linear in partition_parameters.get_all_subclasses(nn.Module)


def test_engine_asks_parameters_for_its_dtype_before_it_takes_them() -> None:
    """A partly partitioned model must have the engine's dtype throughout when _configure_distributed_model begins."""
    source = inspect.getsource(DeepSpeedEngine._configure_distributed_model)
    assert source.index("self.__check_params(self.module, check_dtype)") > source.index("is_zero_init_model = ")
    ours = inspect.signature(SmartInfinityEngine._configure_distributed_model)
    assert list(inspect.signature(DeepSpeedEngine._configure_distributed_model).parameters) == list(ours.parameters)


def test_every_parameter_is_partitioned_by_one_method() -> None:
    """Both ways into ZeRO-3, a constructor under zero.Init and an engine, call _zero_init_param on the instance."""
    for caller in (Init._post_init_method, Init._convert_to_zero_parameters):
        assert "self._zero_init_param(param)" in inspect.getsource(caller)
    assert list(inspect.signature(Init._zero_init_param).parameters) == ["self", "param"]


def test_parameters_are_sent_as_views_of_bytes() -> None:
    """Every method that sends a parameter views its data as uint8, which scalars.py makes work without a dimension.

    What it sends has the class by which we answer: zero.Init converts a parameter before it sends it.
    """
    source = inspect.getsource(Init._zero_init_param)
    assert source.index("self._convert_to_deepspeed_param(param)") < source.index("param.data.view(torch.uint8)")
    senders = (Init._zero_init_param, Init.patch_init_and_builtins, GatheredParameters._exit)
    assert ["data.view(torch.uint8)" in inspect.getsource(sender) for sender in senders] == [True] * 3
    assert inspect.getsource(DeepSpeedEngine._broadcast_model).count("p.data.view(torch.uint8)") == 2
    with pytest.raises(RuntimeError, match="cannot be 0 to view"):
        torch.ones(()).view(torch.uint8)
    with ScalarsAsBytes():
        assert torch.ones(()).view(torch.uint8).tolist() == [0, 0, 128, 63]
    data, of_deepspeed = torch.ones(()), SimpleNamespace(f_globals={"__name__": "deepspeed.runtime"})
    sendable(data, of_deepspeed).view(torch.uint8)[3] = 64
    assert data == 4 and sendable(data, of_deepspeed).view(-1).shape == (1,)


def test_references_to_the_memory_of_a_parameter_are_counted() -> None:
    """The parameter and the storage object are counted; a view, a detached alias and an array raise the count."""
    param = nn.Parameter(torch.randn(4, 3))
    assert torch._C._storage_Use_Count(param.untyped_storage()._cdata) == _OWN_REFERENCES
    aliases: list[Any] = [param[0], param.data, param.detach().numpy()]
    while aliases:
        assert not _is_unused(param)
        aliases.pop()
    assert _is_unused(param)


class Seen(TorchFunctionMode):
    """A mode that notes whether torch asked it."""

    asked = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked = True
        return func(*args, **(kwargs or {}))


def test_modes_are_not_asked_about_two_ways_to_a_parameter() -> None:
    """Parameter(other) and calls under DisableTorchFunction reach no mode; an ordinary copy_ does."""
    param, other = nn.Parameter(torch.randn(4, 3)), torch.zeros(4, 3)
    with Seen() as seen:
        nn.Parameter(param)
        assert not seen.asked
    with torch.no_grad(), torch._C.DisableTorchFunction(), Seen() as seen:
        param.add_(1)
        assert not seen.asked, "DisableTorchFunction holds for modes, too"
    with Seen() as seen:
        param.data.copy_(other)
        assert seen.asked


@RunIf(package="transformers")
def test_transformers_is_told_as_its_own_integration_is() -> None:
    """Transformers reads whether ZeRO-3 is on, and whether zero.Init was entered, where this package sets it."""
    modeling: Any = import_module("transformers.modeling_utils")
    integration: Any = import_module("transformers.integrations.deepspeed")
    initialization: Any = import_module("transformers.initialization")
    for is_zero3 in (True, False):
        told = SimpleNamespace(is_zero3=lambda answer=is_zero3: answer, config={"told": is_zero3})
        with mock.patch.object(integration, "_hf_deepspeed_config_weak_ref", lambda told=told: told):
            assert integration.is_deepspeed_zero3_enabled() is is_zero3
            assert integration.deepspeed_config() == {"told": is_zero3}
    with modeling.set_zero3_state():
        assert modeling._is_ds_init_called is True
    assert modeling._is_ds_init_called is False
    model_class = modeling.PreTrainedModel
    assert "_is_ds_init_called" in inspect.getsource(model_class.from_pretrained)
    for name in ("get_init_context", "from_pretrained"):
        assert isinstance(model_class.__dict__[name], classmethod), name
    assert callable(initialization.no_init_weights)


@RunIf(package="transformers")
def test_transformers_maps_files_by_one_function_and_loads_modules_one_by_one() -> None:
    """With ZeRO-3 each file is passed to load_state_dict first, and each module copies its own parameters."""
    modeling: Any = import_module("transformers.modeling_utils")
    integration: Any = import_module("transformers.integrations.deepspeed")
    assert re.search(r"load_state_dict\(\s*ckpt_file,", inspect.getsource(modeling))
    assert "module._load_from_state_dict(*args)" in inspect.getsource(integration._load_state_dict_into_zero3_model)
