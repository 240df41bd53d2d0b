"""Compressed gradients in a Trainer: what is sent and what is kept, and that neither depends on other settings."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import BlockScaled, CudaError, SmartInfinityStrategy, TopK, TransferConfig
from lightning_smartinfinity.pipeline.gradients import device_selection
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.zero3.optimizer import open_state
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.actions import does
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run

# The recipe has groups, a schedule, accumulation, clipping, a parameter that some steps do not use, and a step that is
# skipped for a NaN.
BASE = Recipe(
    groups=True, scheduler="step", skip_side_at=(1,), nan_at=(2,), depth=1, max_steps=4, accumulate=2, clip=0.3
)
CODECS = {
    "top 5 %": TopK(0.05),
    "top 5 %, without error feedback": TopK(0.05, error_feedback=False),
    "top 5 % of a sample, in bf16": TopK(0.05, exact=False, value_dtype="bf16"),
    "8 bits": BlockScaled(),
}

Result = tuple[Any, dict[str, torch.Tensor]]


def run_of(root: Path, precision: str, codec: Any, *, overlap: str = "none", **settings: Any) -> Run:
    """Return a run whose updates take several tasklets."""
    recipe = dataclasses.replace(BASE, precision=precision)
    options = {"overlap": overlap, "compression": codec}
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, options=options, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Result, Path]]:
    """Return a function that trains a case once without overlap and gives its result and its checkpoint at step 2."""

    @cache
    def trained(precision: str, name: str | None) -> tuple[Result, Path]:
        root = tmp_path_factory.mktemp("straight")
        codec = None if name is None else CODECS[name]
        return result(run_of(root, precision, codec, save_at=(2,))), root / "step-2.ckpt"

    return trained


@pytest.mark.filterwarnings("ignore:.*no gain")
def test_sending_everything_changes_no_bit(straight: Any, tmp_path: Path) -> None:
    """With ratio=1 nothing is compressed, and the other settings are ignored."""
    with pytest.warns(UserWarning, match="value_dtype and exact are ignored"):
        codec = TopK(1.0, value_dtype="bf16")
    assert_same(result(run_of(tmp_path, "bf16-mixed", codec)), straight("bf16-mixed", None)[0])


@pytest.mark.parametrize(
    ("name", "precision", "overlap"),
    [
        ("top 5 %", "32-true", "forward"),
        ("top 5 %, without error feedback", "16-mixed", "backward"),
        ("top 5 % of a sample, in bf16", "bf16-mixed", "backward"),
        ("8 bits", "bf16-mixed", "forward"),
    ],
)
def test_overlap_and_resume_change_no_bit(
    name: str, precision: str, overlap: str, straight: Any, tmp_path: Path
) -> None:
    """An update that is rolled back leaves the residual unchanged, and a checkpoint restores it."""
    (expected, expected_masters), checkpoint = straight(precision, name)
    run = run_of(tmp_path / "whole", precision, CODECS[name], overlap=overlap, delays=0)
    assert_same(result(run), (expected, expected_masters))
    resumed = dataclasses.replace(run, out=str(tmp_path / "resumed"), resume=str(checkpoint))
    (losses, _, _), masters = result(resumed)
    assert losses == expected[0][2 * BASE.accumulate :]
    assert all(torch.equal(masters[parameter], master) for parameter, master in expected_masters.items())


def select_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select with torch on the CPU, as on a GPU."""

    def on_device(*args: Any, **kwargs: Any) -> CompressedGradients:
        return CompressedGradients(*args, **{**kwargs, "device": torch.device("cpu")})

    monkeypatch.setattr(open_state, "CompressedGradients", on_device)


def test_no_memory_to_select_on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory for the second tasklet raises our own error, and no step is committed."""
    select_on_cpu(monkeypatch)
    select, selected = device_selection.top_k_payload, []

    def fail(*args: Any, **settings: Any) -> torch.Tensor:
        if selected:
            raise torch.OutOfMemoryError("too much")
        selected.append(1)
        return select(*args, **settings)

    monkeypatch.setattr(device_selection, "top_k_payload", fail)
    strategy = SmartInfinityStrategy(
        tmp_path / "state", compression=TopK(0.05), overlap="none", transfer=TransferConfig(**SMALL_RING)
    )
    with pytest.raises(CudaError, match=r"no memory on cpu.*too much.*smaller tasklets"):
        fit(LitTiny(Recipe(depth=1, max_steps=1)), tmp_path, strategy, max_steps=1)
    assert strategy._training_optimizer is not None
    assert strategy._training_optimizer.rank_state.handler.generation == 0 and selected


def sent(gradients: dict[str, torch.Tensor], ratio: float) -> dict[str, torch.Tensor]:
    """Return the largest gradients of all parameters, with zeros elsewhere."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients.values()])
    chosen = flat.abs().topk(math.ceil(ratio * len(flat))).indices
    kept = torch.zeros_like(flat).index_copy(0, chosen, flat[chosen])
    parts = kept.split([gradient.numel() for gradient in gradients.values()])
    return {name: part.view_as(gradient) for (name, gradient), part in zip(gradients.items(), parts, strict=True)}


@pytest.mark.parametrize(
    ("error_feedback", "clip"),
    long_but([(True, 0.1), (False, None)], itertools.product([True, False], [None, 0.1])),
)
def test_trains_like_torch_with_the_same_compression(error_feedback: bool, clip: float | None, tmp_path: Path) -> None:
    """With one tasklet, training equals a torch loop that applies the largest sums of gradient and residual.

    Clipping does not scale the residual. It uses the norm of the gradients before compression. A gradient that is not
    finite reaches neither the update nor the residual.
    """
    recipe = Recipe(max_steps=5, depth=1, precision="32-true", accumulate=2, nan_at=(2,))
    residual: dict[str, torch.Tensor] = {}
    factors: list[float] = []

    def compress(step: int, live: dict[str, torch.nn.Parameter]) -> None:
        if step in recipe.nan_at:
            return
        gradients = {name: master.grad for name, master in live.items() if master.grad is not None}
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        factors.append(1.0 if clip is None else max(1.0, (norm + 1e-6) / clip))
        total = {name: gradient + residual.get(name, torch.zeros(())) for name, gradient in gradients.items()}
        for name, value in sent(total, 0.1).items():
            if error_feedback:
                residual[name] = total[name] - value
            live[name].grad = value / factors[-1]

    expected = reference.train(recipe, skipped=recipe.nan_at, before_update=compress)
    assert clip is None or min(factors) > 2
    options = {"compression": TopK(0.1, error_feedback=error_feedback), "overlap": "none"}
    run = Run(out=str(tmp_path), recipe=dataclasses.replace(recipe, clip=clip), options=options)
    (losses, _, _), masters = result(run)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-5, rtol=0)
    for name, master in expected.masters.items():
        torch.testing.assert_close(masters[name], master, atol=1e-5, rtol=0, msg=name)


pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain", "ignore:A step was skipped")

PLAIN = Recipe(depth=1, max_steps=4, precision="32-true")


def strategy_in(root: Path, *, overlap: str = "none", error_feedback: bool = True) -> SmartInfinityStrategy:
    codec = TopK(0.05, error_feedback=error_feedback)
    return SmartInfinityStrategy(root / "state", compression=codec, overlap=overlap, transfer=SMALL_RING)


def test_checkpoint_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A residual that the checkpoint lacks begins at zero; one that is not needed is left out. Both log a warning."""
    begun: list[torch.Tensor] = []

    def note(trainer: Any, module: Any) -> None:
        begun.append(trainer.strategy._training_optimizer.rank_state.compressed.residual.clone())

    for error_feedback in (True, False):
        saving, loading = (tmp_path / f"{what} {error_feedback}" for what in ("saved", "loaded"))
        trainer = fit(LitTiny(PLAIN), saving, strategy_in(saving, error_feedback=error_feedback), max_steps=2)
        trainer.save_checkpoint(saving / "half.ckpt")
        trainer.strategy.close()  # type: ignore[attr-defined]
        strategy = strategy_in(loading, error_feedback=not error_feedback)
        callbacks = [] if error_feedback else [does(on_train_start=note, on_train_end=note)]
        trainer = quiet_trainer(loading, strategy, max_steps=3, callbacks=callbacks)
        trainer.fit(LitTiny(PLAIN), ckpt_path=saving / "half.ckpt")
    assert not begun[0].any() and begun[1].any()
    half = strategy_in(tmp_path / "half")
    half.initial_scale_power = 10
    note_end = does(on_train_end=note)
    fit(LitTiny(PLAIN), tmp_path / "half", half, max_steps=1, precision="16-mixed", callbacks=[note_end])
    fit(LitTiny(PLAIN), tmp_path / "full", strategy_in(tmp_path / "full"), max_steps=1, callbacks=[note_end])
    unscaled, exact = (float(residual.abs().max()) for residual in begun[2:])
    assert unscaled == pytest.approx(exact, rel=0.05), "the residual has a loss scale"
    left_out, at_zero = (record for record in caplog.records if "residual" in record.message)
    assert "residual of compressed gradients is left out" in left_out.message
    assert at_zero.levelno == logging.WARNING and "begins at zero: the checkpoint gives none" in at_zero.message
