"""Weights initialised after their module's constructor have the values of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import UnsupportedError
from tests.helpers.initialised import WIDTH, Initialised, Table
from tests.helpers.ranks import on_ranks
from tests.training.configure_model_worker import Built, fit, inputs, on_each_rank, squares


def built_whole() -> Initialised:
    """Return the same model built by plain torch."""
    torch.manual_seed(0)
    return Initialised()


def assert_same_weights(weights: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Assert that the weights equal the model's bit for bit, after rounding to their dtype."""
    expected = dict(model.named_parameters())
    assert weights.keys() == expected.keys()
    different = [name for name, value in weights.items() if not torch.equal(value, expected[name].to(value.dtype))]
    assert not different


@pytest.mark.parametrize("gathered_bytes", [0, 1 << 30])
def test_every_way_to_initialise_gives_the_values_of_torch(
    gathered_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Weights, buffers and the first loss equal torch's, however the model initialises its weights.

    This covers in-place writes, ``.data``, views, copies, assignments, state dicts and tying. It holds whether
    parameters are partitioned again at once or stay gathered until the model is built.
    """
    monkeypatch.setattr("lightning_smartinfinity.zero3.parameters.gather_on_use._GATHERED_BYTES", gathered_bytes)
    module, expected = fit(Built(Initialised, squares), tmp_path), built_whole()
    assert_same_weights(module.weights, expected)
    assert module.losses[0] == pytest.approx(float(squares(expected, inputs()[:2]).detach()), abs=1e-6)
    assert module.model.total == expected.total
    assert module.model.parts["second"].weight is module.model.parts["first"].weight


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what both ranks see."""
    return on_ranks(on_each_rank, tmp_path_factory.mktemp("two"))


def test_two_processes_take_the_values_of_the_first(two_processes: list[dict[str, Any]]) -> None:
    """Each rank draws other numbers, and both get what rank 0 drew, which equals plain torch's bit for bit.

    This holds for buffers, too, complex ones among them, which DeepSpeed alone leaves as each rank drew them.
    """
    whole = built_whole()
    for seen in two_processes:
        assert_same_weights(seen["32-true"]["weights"], whole)
        assert seen["32-true"]["buffers"].keys() == dict(whole.named_buffers()).keys()
        assert all(torch.equal(seen["32-true"]["buffers"][name], buffer) for name, buffer in whole.named_buffers())


def test_mixed_precision_builds_in_fp32(two_processes: list[dict[str, Any]]) -> None:
    """With bf16-mixed weights are drawn in fp32 and rounded when they are partitioned."""
    weights = two_processes[1]["bf16-mixed"]["weights"]
    for name, value in built_whole().named_parameters():
        assert weights[name].dtype is torch.bfloat16
        # Values computed from a partitioned weight are rounded twice.
        torch.testing.assert_close(weights[name].float(), value.detach(), rtol=2**-7, atol=1e-6, msg=name)


class Reshaped(nn.Module):
    """A module that gives a child's weight another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.table.weight.data = torch.zeros(3, WIDTH)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """A parameter with another shape than its partitioned one raises an error that names it."""
    with pytest.raises(UnsupportedError, match=r"table\.weight") as caught:
        fit(Built(Reshaped, squares), tmp_path)
    assert caught.value.remedy.endswith(".")
    fit(Built(Table, squares), tmp_path)  # torch is no longer patched
