"""Values written into a training from outside last, and values read are right, as in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import safe_get_full_fp32_param

from lightning_smartinfinity import StorageError
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.training.test_parity import LOSS_TOLERANCE, MASTER_TOLERANCE
from tests.training.writes_worker import EDITS, NAMES, SCALE, Seen, expected, on_each_rank, only_gathered, run

ONLY_GATHERED = next(step for step, edit in enumerate(EDITS) if edit.ours is only_gathered)


def assert_same(ours: Seen, torchs: Seen, precision: str) -> None:
    """Assert that all values read, the losses and the masters equal torch's."""
    kind = precision.split("-")[0]
    assert ours.read.keys() == torchs.read.keys()
    assert ours.masters.keys() == torchs.masters.keys()
    for what, value in torchs.read.items():
        mine, scale = ours.read[what], SCALE if what.endswith("grad") and kind == "16" else 1.0
        if value is None or mine is None:
            assert value is mine is None, what
        else:
            assert_close(mine, value, what, atol=MASTER_TOLERANCE[kind] * scale, rtol=1e-2)
    assert_close(torch.tensor(ours.losses), torch.tensor(torchs.losses), "losses", atol=LOSS_TOLERANCE[kind])
    for name, master in torchs.masters.items():
        assert_close(ours.masters[name], master, name, atol=MASTER_TOLERANCE[kind])


def assert_close(ours: torch.Tensor, torchs: torch.Tensor, what: str, *, atol: float, rtol: float = 0.0) -> None:
    """Assert that two tensors are equal within a tolerance, with a message that names them."""
    torch.testing.assert_close(ours, torchs, atol=atol, rtol=rtol, msg=lambda message: f"{what}: {message}")


def assert_masters_kept(seen: Seen) -> None:
    """Assert that gathering for a write without writing left every bit of the masters."""
    for name in NAMES:
        before, after = (seen.read[f"{when} {ONLY_GATHERED} {name} master"] for when in ("before", "edited"))
        assert before is not None and after is not None
        assert torch.equal(before, after), name


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
def test_what_is_written_from_outside_lasts(precision: str, tmp_path: Path) -> None:
    """Masters, moments and gradients equal plain torch's before and after every write and at the end."""
    seen = run(precision, tmp_path)
    assert_same(seen, expected(precision), precision)
    assert_masters_kept(seen)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what both ranks have read."""
    return on_ranks(on_each_rank, tmp_path_factory.mktemp("two"), "bf16-mixed")


def test_two_processes_write_alike(two_processes: list[dict[str, Any]]) -> None:
    """Two ranks also equal plain torch. Rank 0's value of a gathered parameter counts."""
    seen = two_processes[0]["bf16-mixed"]
    assert_same(seen, expected("bf16-mixed", world_size=2), "bf16-mixed")
    assert_masters_kept(seen)


def test_full_weights_reach_every_rank(two_processes: list[dict[str, Any]]) -> None:
    """On two ranks masters equal the file's fp32 values bit for bit, parameters the rounded values; moments are zero.

    Rank 1 passes a tensor of the wrong size to a collective call. Neither rank hangs, and both name the size.
    """
    for seen in (of_rank["full"] for of_rank in two_processes):
        for name, value in seen["params"].items():
            weight = seen["weights"][name]
            assert torch.equal(value, weight.bfloat16()), name
            assert seen["masters"][name] is None or torch.equal(seen["masters"][name], weight), name
        assert [name for name, master in seen["masters"].items() if master is None] == ["model.positions.weight"]
        assert all(bool((value == 0).all()) for value in seen["moments"].values())
        assert "(33,)" in seen["refused"]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_write_that_fails_leaves_the_parameter_as_it_was(precision: str, tmp_path: Path) -> None:
    """After the error the parameter and its master still hold the same value."""
    module = LitTiny(Recipe(precision=precision, max_steps=1))
    trainer = quiet_trainer(tmp_path, precision=precision, max_steps=1)
    trainer.fit(module)
    optimizer, weight = trainer.strategy.optimizers[0], module.model.tokens.weight
    before = safe_get_full_fp32_param(weight)
    testing.inject(optimizer.update.drained_handler()._device._pipeline, fail_write_at=0)
    with pytest.raises(StorageError), GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(7.0)
    with GatheredParameters([weight]):
        assert torch.equal(weight, before.to(weight.dtype))
    assert torch.equal(safe_get_full_fp32_param(weight), before)
