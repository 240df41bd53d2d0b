"""Compressed gradients in a Trainer: what is sent and what is kept, and that neither depends on other settings."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import BlockScaled, CudaError, SmartInfinityStrategy, StorageError, TopK, TransferConfig
from lightning_smartinfinity.pipeline.gradients import device_selection
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.zero3.optimizer import open_state
from tests.helpers import reference
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.test_overlap import SMALL_RING, assert_same, result
from tests.training.worker import Run, launch

# The recipe has groups, a schedule, accumulation, clipping, and a parameter that some steps do not use.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2, clip=0.3)
CODECS = {
    "top 5 %": TopK(0.05),
    "top 5 %, without error feedback": TopK(0.05, error_feedback=False),
    "top 5 % of a sample, in bf16": TopK(0.05, exact=False, value_dtype="bf16"),
    "8 bits": BlockScaled(),
}
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")

Result = tuple[Any, dict[str, torch.Tensor]]


def run_of(root: Path, precision: str, codec: Any, *, overlap: str = "none", **settings: Any) -> Run:
    """Return a run whose updates take several tasklets."""
    recipe = dataclasses.replace(BASE, precision=precision)
    options = {"overlap": overlap, "compression": codec}
    return Run(out=str(root), recipe=recipe, transfer=SMALL_RING, options=options, **settings)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Result, Path]]:
    """Return a function that trains a case once without overlap and gives its result and its checkpoint at step 2."""
    known: dict[tuple[str, str | None], tuple[Result, Path]] = {}

    def trained(precision: str, name: str | None) -> tuple[Result, Path]:
        if (precision, name) not in known:
            root = tmp_path_factory.mktemp("straight")
            run = run_of(root, precision, None if name is None else CODECS[name], save_at=(2,))
            known[precision, name] = result(run), root / "step-2.ckpt"
        return known[precision, name]

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
    # Compression changes the losses, so that these comparisons mean something.
    assert expected[0] != straight(precision, None)[0][0][0]


def select_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Select with torch on the CPU, as on a GPU."""

    def on_device(*args: Any, **kwargs: Any) -> CompressedGradients:
        return CompressedGradients(*args, **{**kwargs, "device": torch.device("cpu")})

    monkeypatch.setattr(open_state, "CompressedGradients", on_device)


@pytest.mark.parametrize("begun", [0, 1])
def test_no_memory_to_select_on_a_device(begun: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory raises our own error, and no step is committed."""
    select_on_cpu(monkeypatch)
    select, selected = device_selection.top_k_payload, []

    def fail(*args: Any, **settings: Any) -> torch.Tensor:
        if len(selected) == begun:
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
    assert strategy._training_optimizer.rank_state.handler.generation == 0
    assert len(selected) == begun


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

    Clipping does not scale the residual. It uses the norm of the gradients before compression.
    """
    recipe = Recipe(max_steps=5, depth=1, precision="32-true", accumulate=2)
    residual: dict[str, torch.Tensor] = {}
    factors: list[float] = []

    def compress(_: int, live: reference.Live) -> None:
        gradients = {name: master.grad for name, master in live.masters.items() if master.grad is not None}
        norm = math.sqrt(sum(float((gradient.double() ** 2).sum()) for gradient in gradients.values()))
        factors.append(1.0 if clip is None else max(1.0, (norm + 1e-6) / clip))
        total = {name: gradient + residual.get(name, torch.zeros(())) for name, gradient in gradients.items()}
        for name, value in sent(total, 0.1).items():
            if error_feedback:
                residual[name] = total[name] - value
            live.masters[name].grad = value / factors[-1]

    expected = reference.train(recipe, before_update=compress)
    assert clip is None or min(factors) > 2
    options = {"compression": TopK(0.1, error_feedback=error_feedback), "overlap": "none"}
    run = Run(out=str(tmp_path), recipe=dataclasses.replace(recipe, clip=clip), options=options)
    (losses, _, _), masters = result(run)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected.losses), atol=1e-5, rtol=0)
    for name, master in expected.masters.items():
        torch.testing.assert_close(masters[name], master, atol=1e-5, rtol=0, msg=name)


def test_two_processes(tmp_path: Path) -> None:
    """Overlap and resuming change no bit on two processes whose partitions have padding."""
    run = run_of(tmp_path / "straight", "32-true", CODECS["top 5 %"], devices=2, save_at=(2,))
    straight = dataclasses.replace(run, recipe=dataclasses.replace(BASE, odd=True))
    backward = dataclasses.replace(
        straight, out=str(tmp_path / "backward"), options={**straight.options, "overlap": "backward"}
    )
    checkpoint = str(tmp_path / "straight" / "step-2.ckpt")
    resumed = dataclasses.replace(straight, out=str(tmp_path / "resumed"), resume=checkpoint)
    expected, *outcomes = launch(straight, backward, resumed)
    for outcome, first in zip(outcomes, (0, 2 * BASE.accumulate), strict=True):
        assert outcome.losses == expected.losses[first:]
        for name, master in expected.masters.items():
            assert torch.equal(outcome.masters[name], master), name


pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain", "ignore:A step was skipped")

PLAIN = Recipe(depth=1, max_steps=4, precision="32-true")
RING = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)


def strategy_in(root: Path, *, overlap: str = "none", error_feedback: bool = True) -> SmartInfinityStrategy:
    codec = TopK(0.05, error_feedback=error_feedback)
    return SmartInfinityStrategy(root / "state", compression=codec, overlap=overlap, transfer=RING)


def residual_of(strategy: Any) -> torch.Tensor:
    return strategy._training_optimizer.rank_state.compressed.residual  # type: ignore[no-any-return]


class Watching(LitTiny):
    """A module that copies the residual after each batch, once the step is committed."""

    def on_train_start(self) -> None:
        self.seen = [residual_of(self.trainer.strategy).clone()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.trainer.strategy.drain()
        self.seen.append(residual_of(self.trainer.strategy).clone())


@pytest.mark.parametrize(
    ("precision", "overlap"), [("32-true", "none"), ("bf16-mixed", "forward"), ("bf16-mixed", "backward")]
)
def test_a_skipped_step_leaves_it(tmp_path: Path, precision: str, overlap: str) -> None:
    """A gradient that is not finite reaches neither the update nor the residual."""
    module = Watching(dataclasses.replace(PLAIN, nan_at=(2,), precision=precision))
    fit(module, tmp_path, strategy_in(tmp_path, overlap=overlap), max_steps=4, precision=precision)
    zero, first, second, skipped, last = module.seen
    assert not zero.any()
    assert torch.isfinite(last).all()
    assert torch.equal(second, skipped)
    assert not torch.equal(first, second) and not torch.equal(skipped, last)


class AtCommit(Watching):
    """A module with a function that the second step calls to commit; it gets the rank's state and the commit."""

    def __init__(self, act: Callable[[Any, Callable[[], None]], None], *, by_store: bool = True) -> None:
        super().__init__(PLAIN)
        self.act, self.by_store, self.acted = act, by_store, False

    def on_train_batch_start(self, *args: Any) -> None:
        state: Any = self.trainer.strategy._training_optimizer.rank_state  # type: ignore[attr-defined]
        owner = state.handler._store if self.by_store else state.handler
        if self.trainer.global_step == 1 and not self.acted:
            commit, self.acted = owner.commit, True

            def acting(**settings: Any) -> None:
                owner.commit = commit
                self.act(state, partial(commit, **settings))

            owner.commit = acting


def test_a_failed_step_leaves_it(tmp_path: Path) -> None:
    """If the commit fails, the step is rolled back and the residual is the previous one."""

    def fail(state: Any, commit: Callable[[], None]) -> None:
        raise StorageError("Cannot commit.", "Try again.")

    strategy, module = strategy_in(tmp_path), AtCommit(fail)
    with pytest.raises(StorageError, match="Cannot commit"):
        fit(module, tmp_path, strategy, max_steps=2)
    assert len(module.seen) == 2 and module.seen[-1].any()
    assert torch.equal(residual_of(strategy), module.seen[-1])


@pytest.mark.parametrize(("overlap", "done"), [("backward", "record"), ("forward", "all")])
def test_ctrl_c_right_after_a_commit(tmp_path: Path, overlap: str, done: str) -> None:
    """A step counts once its commit record is written, and at the very end of the commit: its residual is kept."""

    def interrupt(state: Any, commit: Callable[[], None]) -> None:
        commit()
        raise KeyboardInterrupt

    straight, strategy = Watching(PLAIN), strategy_in(tmp_path, overlap=overlap)
    fit(straight, tmp_path, strategy_in(tmp_path / "straight", overlap=overlap), max_steps=4)
    module = AtCommit(interrupt, by_store=done == "record")
    with suppress(KeyboardInterrupt, SystemExit):
        fit(module, tmp_path, strategy, max_steps=2)
    strategy.drain()
    assert module.acted
    committed = strategy._training_optimizer.rank_state.handler.generation  # type: ignore[union-attr]
    assert torch.equal(residual_of(strategy), straight.seen[committed])


def test_a_damaged_payload(tmp_path: Path) -> None:
    """Damage between the update and the commit ends training with our own error, and the state is lost."""

    def damage(state: Any, commit: Callable[[], None]) -> None:
        state.compressed._payloads.tensor[4] ^= 1  # flips a bit of the version in the first header
        commit()

    strategy = strategy_in(tmp_path)
    with pytest.raises(StorageError, match=r"cannot be kept.*version.*resume from a checkpoint"):
        fit(AtCommit(damage), tmp_path, strategy, max_steps=3)
    with pytest.raises(StorageError, match="is lost"):
        _ = strategy._training_optimizer.rank_state.handler  # type: ignore[union-attr]


def test_what_it_holds_and_takes(tmp_path: Path) -> None:
    """Four bytes per parameter beside the payloads, and no loss scale; a warning says that a host gains nothing."""
    held: dict[str, int] = {}

    class Asking(Watching):
        def on_train_end(self) -> None:
            held.update(self.trainer.strategy.host_bytes)

    module, full = (Asking(dataclasses.replace(PLAIN, precision=name)) for name in ("16-mixed", "32-true"))
    strategy = strategy_in(tmp_path)
    strategy.initial_scale_power = 10
    with pytest.warns(UserWarning, match=r"TopK\(ratio=0\.05.*is predicted to bring no gain.*host memory"):
        fit(module, tmp_path, strategy, max_steps=1, precision="16-mixed")
    assert held["residual"] == 4 * strategy.state_numel and 0 < held["payloads"] < 4 * strategy.state_numel
    fit(full, tmp_path / "fp32", strategy_in(tmp_path / "fp32"), max_steps=1, precision="32-true")
    assert float(module.seen[-1].abs().max()) == pytest.approx(float(full.seen[-1].abs().max()), rel=0.05)


def test_checkpoint_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A residual that the checkpoint lacks begins at zero; one that is not needed is left out. Both log a warning."""
    for error_feedback in (True, False):
        saving, loading = (tmp_path / f"{what} {error_feedback}" for what in ("saved", "loaded"))
        trainer = fit(LitTiny(PLAIN), saving, strategy_in(saving, error_feedback=error_feedback), max_steps=2)
        trainer.save_checkpoint(saving / "half.ckpt")
        trainer.strategy.close()  # type: ignore[attr-defined]
        strategy = strategy_in(loading, error_feedback=not error_feedback)
        module = LitTiny(PLAIN) if error_feedback else Watching(PLAIN)
        quiet_trainer(loading, strategy, max_steps=3).fit(module, ckpt_path=saving / "half.ckpt")
    assert isinstance(module, Watching) and not module.seen[0].any() and module.seen[1].any()
    left_out, begun = (record for record in caplog.records if "residual" in record.message)
    assert "residual of compressed gradients is left out" in left_out.message
    assert begun.levelno == logging.WARNING and "begins at zero: the checkpoint gives none" in begun.message
