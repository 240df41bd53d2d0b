"""Tests what exports read of torch and transformers."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

_SIZES = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.mark.seam("LiveWeights and plan_for know what a state dict contains, without asking for one")
def test_a_state_dict_is_made_of_what_is_read() -> None:
    """A state dict has parameters, Module._buffers that are not in _non_persistent_buffers_set, and get_extra_state."""
    module = torch.nn.BatchNorm1d(2)
    module.register_buffer("scratch", torch.ones(1), persistent=False)
    assert module._non_persistent_buffers_set == {"scratch"}
    persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
    assert set(module.state_dict()) == {*dict(module.named_parameters()), *persistent}

    class Extra(torch.nn.Module):
        def get_extra_state(self) -> str:
            return "extra"

    assert type(module).get_extra_state is torch.nn.Module.get_extra_state
    assert list(Extra().state_dict()) == ["_extra_state"]


@pytest.mark.seam("telling which tensor a view is of")
def test_views_without_memory_keep_their_storage() -> None:
    """A view on the meta device has its base's UntypedStorage._cdata and an offset in it; a copy has another."""
    base = torch.empty(4, 6, device="meta")
    view = base[1].narrow(0, 2, 3)
    assert view.untyped_storage()._cdata == base.untyped_storage()._cdata
    assert view.storage_offset() == 8
    assert base.clone().untyped_storage()._cdata != base.untyped_storage()._cdata


@pytest.mark.seam("names and shapes in files of transformers")
def test_conversions_are_reverted_without_memory() -> None:
    """core_model_loading.revert_weight_conversion needs no memory, and prefers a model's _weight_conversions."""
    sizes = {**_SIZES, "intermediate_size": 4, "vocab_size": 5, "num_local_experts": 2}
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))  # type: ignore[arg-type]
    given = {name: torch.empty(value.shape, device="meta") for name, value in model.state_dict().items()}
    reverted = revert_weight_conversion(model, given)
    assert reverted["model.layers.0.block_sparse_moe.experts.1.w2.weight"].shape == (8, 4)
    assert reverted["lm_head.weight"] is given["lm_head.weight"]
    model._weight_conversions = []
    assert revert_weight_conversion(model, given).keys() == given.keys()


@pytest.mark.seam("plan_for and pretrained_export: the tensors in a file of transformers, and the size of files")
def test_models_of_transformers_have_what_is_read_of_them() -> None:
    """Models have all_tied_weights_keys and _keys_to_ignore_on_save; save_pretrained has a default max_shard_size."""
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2))
    assert model.all_tied_weights_keys == {"lm_head.weight": "transformer.wte.weight"}
    assert not model._keys_to_ignore_on_save
    size = inspect.signature(transformers.PreTrainedModel.save_pretrained).parameters["max_shard_size"].default
    assert isinstance(size, (int, str))
