"""Models of transformers built in configure_model have the same weights as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.training.configure_model_worker import fit
from tests.training.transformers_worker import BuiltOnTokens, construct, language_loss, load, tokens

pytestmark = RunIf(package="transformers")


def constructed_whole(kind: str) -> nn.Module:
    """Construct the model in plain torch from the same seed."""
    torch.manual_seed(0)
    return construct(kind)


def saved_whole(folder: Path) -> nn.Module:
    """Save a model with changed weights, as after a training, to a folder."""
    torch.manual_seed(5)
    model: Any = construct("gpt2")
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    model.save_pretrained(folder)
    return model  # type: ignore[no-any-return]


def assert_same_weights(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Assert that the weights equal the model's bit for bit, after rounding to their dtype."""
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    assert not [name for name, value in weights.items() if not torch.equal(value, expected[name].to(value.dtype))]


@pytest.mark.parametrize(("kind", "precision"), [("gpt2", "bf16-mixed"), ("llama", "32-true")])
def test_constructed_models_are_those_of_torch(kind: str, precision: str, tmp_path: Path) -> None:
    """Weights, tied weights, buffers and the first loss equal plain torch's. Stock leaves such weights empty."""
    module = fit(BuiltOnTokens(lambda: construct(kind)), tmp_path, precision=precision)
    expected = constructed_whole(kind)
    assert_same_weights(module.weights, expected)
    for name, buffer in expected.named_buffers():
        assert torch.equal(module.model.get_buffer(name), buffer), name
    tolerance = 1e-6 if precision == "32-true" else 2e-2
    assert module.losses[0] == pytest.approx(float(language_loss(expected, tokens()[:2])), abs=tolerance)


def test_pretrained_weights_are_loaded(tmp_path: Path) -> None:
    """from_pretrained puts a folder's weights into partitioned parameters. Models built later are not partitioned."""
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    expected = saved_whole(tmp_path / "weights")
    module = fit(BuiltOnTokens(lambda: load(tmp_path / "weights")), tmp_path, precision="bf16-true")
    assert_same_weights(module.weights, expected)
    assert module.partitioned and all(module.partitioned)
    assert not is_deepspeed_zero3_enabled()
    assert not any(hasattr(param, "ds_id") for param in load(tmp_path / "weights").parameters())


def test_two_processes_have_the_same_weights(tmp_path: Path) -> None:
    """Both ranks have the weights of plain torch, constructed or loaded."""
    expected = {"constructed": constructed_whole("gpt2"), "loaded": saved_whole(tmp_path / "weights")}
    done = run_module("tests.training.transformers_worker", tmp_path, ranks=2)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    for how, model in expected.items():
        for rank in range(2):
            seen = torch.load(tmp_path / f"{how}-{rank}.pt", weights_only=True)
            assert_same_weights(seen["weights"], model)
            assert all(seen["partitioned"])
