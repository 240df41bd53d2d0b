"""Shapes and passes of a model that is known by a number alone."""

from __future__ import annotations

import pytest
import transformers

from lightning_smartinfinity.planning.model import LlamaShape, ModelFigures, Passes, llama_shape

PASSES = Passes(
    batch=2,
    seq=8,
    saved_bytes=1000,
    kept_bytes=200,
    peak_bytes=1500,
    logits_bytes=300,
    forward_flops=10.0,
    backward_flops=20.0,
)


@pytest.mark.parametrize("numel", [20e6, 124e6, 1.1e9, 7e9, 13e9, 70e9])
def test_a_number_becomes_a_shape_of_about_that_size(numel: float) -> None:
    """The shape has as many parameters as asked, within 8 %, and whole heads."""
    shape = llama_shape(round(numel))
    assert sum(shape.sizes()) == pytest.approx(numel, rel=0.08)
    assert shape.width % shape.heads == 0


def test_llama_7b_is_met() -> None:
    """A shape of 6.74 billion parameters has about the layers and the width that Meta published for Llama 7B."""
    shape = llama_shape(6_738_415_616)
    assert shape.layers == pytest.approx(32, abs=1)
    assert shape.width == pytest.approx(4096, abs=128)


def test_sizes_are_those_of_transformers() -> None:
    """The formula lists the parameters of transformers' LlamaForCausalLM, in its order."""
    shape = LlamaShape(layers=2, width=64, inner=128, heads=1, vocab=100)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=1, vocab_size=100
    )
    model = transformers.LlamaForCausalLM(config)
    assert shape.sizes() == tuple(param.numel() for param in model.parameters())


def test_passes_grow_with_the_batch() -> None:
    """All figures are proportional to the number of sequences, if they are formulas."""
    six = PASSES.of_batch(6)
    assert (six.saved_bytes, six.peak_bytes, six.logits_bytes, six.forward_flops) == (3000, 4500, 900, 30.0)
    one = PASSES.of_batch(1)
    assert (one.saved_bytes, one.peak_bytes) == (500, 750)


def test_activation_checkpoints_keep_inputs_and_one_layer() -> None:
    """With four layers, a layer's share of what is not kept is 200 bytes; the peak above what is saved is 500."""
    assert PASSES.activation_bytes(checkpointing=False, num_layers=4) == 1200
    assert PASSES.activation_bytes(checkpointing=True, num_layers=4) == 200 + 500 - 300
    assert PASSES.activation_bytes(checkpointing=True, num_layers=1) == 200 + 800 - 300
    assert PASSES.recomputed_flops(checkpointing=True) == 30.0


def test_a_model_counts_its_parameters() -> None:
    """Frozen parameters count in the model, not in what is trained."""
    model = ModelFigures(name="m", trained=(3, 4), frozen=(5,))
    assert (model.numel, model.trained_numel, model.largest) == (12, 7, 5)
