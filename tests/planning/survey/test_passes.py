"""Counts on fake tensors against what real tensors take."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from transformers import LlamaForCausalLM

from lightning_smartinfinity.planning.survey.passes import count_passes, loss_of
from tests.helpers.model_folder import llama_config

CONFIG = llama_config(num_hidden_layers=4, vocab_size=512, use_cache=False)
BATCH, SEQ = 2, 32


@pytest.fixture(scope="module")
def passes():  # type: ignore[no-untyped-def]
    with FakeTensorMode():
        found, why = count_passes(LlamaForCausalLM(CONFIG), batch=BATCH, seq=SEQ)
    assert found is not None, why
    return found


@pytest.mark.seam("counting bytes", "torch.utils._python_dispatch.TorchDispatchMode; untyped_storage lives as memory.")
def test_saved_bytes_are_what_autograd_saves(passes) -> None:  # type: ignore[no-untyped-def]
    """Autograd's own hooks on a real model see as many bytes as the count, within 5 %."""
    model = LlamaForCausalLM(CONFIG)
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, batch=BATCH, seq=SEQ)
    assert passes.saved_bytes == pytest.approx(sum(storage.nbytes() for storage in saved.values()), rel=0.05)


@pytest.mark.seam(
    "counting attention on a CPU",
    "Torch counts no ``aten._scaled_dot_product_flash_attention_for_cpu``, nor its "
    "``_scaled_dot_product_flash_attention_for_cpu_backward``.",
)
def test_operations_are_those_of_the_matrices(passes) -> None:  # type: ignore[no-untyped-def]
    """Forward takes two operations per weight of a matrix and token, and attention; backward takes twice as many."""
    model = LlamaForCausalLM(CONFIG)
    tokens = BATCH * SEQ
    weights = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2 and "embed" not in name)
    attention = 4 * tokens * SEQ * CONFIG.hidden_size * CONFIG.num_hidden_layers
    assert passes.forward_flops == pytest.approx(2 * tokens * weights + attention, rel=0.01)
    assert passes.backward_flops == pytest.approx(2 * passes.forward_flops, rel=0.15)


def test_what_is_kept_and_at_the_peak(passes) -> None:  # type: ignore[no-untyped-def]
    """Activation checkpoints keep at least the inputs of all layers; at the peak are the logits and their gradient."""
    inputs = 4 * BATCH * SEQ * CONFIG.hidden_size * CONFIG.num_hidden_layers
    assert inputs <= passes.kept_bytes < passes.saved_bytes
    one = 4 * BATCH * SEQ * CONFIG.vocab_size  # in fp32, and no more than five such tensors
    assert 2 * one <= passes.logits_bytes <= 5 * one
    assert passes.logits_bytes < passes.peak_bytes


@pytest.mark.parametrize("text", ["no such input\nand more", ""])
def test_a_model_that_cannot_be_run_says_why(text: str) -> None:
    """The plan tells the class and the first line of what its code raises, and is made all the same."""

    class Broken(LlamaForCausalLM):
        def forward(self, *args: object, **kwargs: object) -> object:
            raise RuntimeError(text)

    with FakeTensorMode():
        found, why = count_passes(Broken(CONFIG), batch=1, seq=4)
    assert found is None
    assert f"RuntimeError: {text}".partition("\n")[0].rstrip(": ") in why
    assert "and more" not in why
