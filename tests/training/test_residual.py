"""The residual holds what compression leaves out."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, TopK, TransferConfig, native
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain", "ignore:A step was skipped")

RECIPE = Recipe(depth=1, max_steps=4, precision="32-true")
SMALL_RING = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)


def strategy_in(root: Path, *, overlap: str = "none", error_feedback: bool = True) -> SmartInfinityStrategy:
    codec = TopK(0.05, error_feedback=error_feedback)
    return SmartInfinityStrategy(root / "state", compression=codec, overlap=overlap, transfer=SMALL_RING)


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
    ("precision", "overlap"),
    long_but(
        [("32-true", "none"), ("bf16-mixed", "forward"), ("bf16-mixed", "backward")],
        itertools.product(["32-true", "bf16-mixed"], ["none", "forward", "backward"]),
    ),
)
def test_a_skipped_step_leaves_it(tmp_path: Path, precision: str, overlap: str) -> None:
    """A gradient that is not finite reaches neither the update nor the residual."""
    module = Watching(dataclasses.replace(RECIPE, nan_at=(2,), precision=precision))
    fit(module, tmp_path, strategy_in(tmp_path, overlap=overlap), max_steps=4, precision=precision)
    zero, first, second, skipped, last = module.seen
    assert not zero.any()
    assert torch.isfinite(last).all()
    assert torch.equal(second, skipped)
    assert not torch.equal(first, second) and not torch.equal(skipped, last)


def test_loss_scale_is_not_in_it(tmp_path: Path) -> None:
    """The residual in fp16 is about as large as in fp32, without the loss scale."""
    largest = {}
    for precision in ("32-true", "16-mixed"):
        module = Watching(dataclasses.replace(RECIPE, precision=precision, max_steps=1))
        strategy = strategy_in(tmp_path / precision)
        strategy.initial_scale_power = 10
        fit(module, tmp_path / precision, strategy, max_steps=1, precision=precision)
        largest[precision] = float(module.seen[-1].abs().max())
    assert largest["16-mixed"] == pytest.approx(largest["32-true"], rel=0.05)


def test_a_failed_step_leaves_it(tmp_path: Path) -> None:
    """If the commit fails, the step is rolled back and the residual is the previous one."""
    strategy = strategy_in(tmp_path)

    class Failing(Watching):
        def on_train_batch_end(self, *args: Any) -> None:
            super().on_train_batch_end(*args)
            store = self.trainer.strategy._training_optimizer.rank_state.handler._store

            def fail(**_: Any) -> None:
                raise StorageError("Cannot commit.", "Try again.")

            store.commit = fail

    module = Failing(RECIPE)
    with pytest.raises(StorageError, match="Cannot commit"):
        fit(module, tmp_path, strategy, max_steps=2)
    assert len(module.seen) == 2 and module.seen[-1].any()
    assert torch.equal(residual_of(strategy), module.seen[-1])


INTERRUPTED = [("none", "record"), ("forward", "record"), ("backward", "record"), ("forward", "all")]


@pytest.mark.parametrize(("overlap", "done"), long_but([("backward", "record"), ("forward", "all")], INTERRUPTED))
def test_ctrl_c_right_after_a_commit(tmp_path: Path, overlap: str, done: str) -> None:
    """A step counts once its commit record is written: its residual is kept.

    This also holds for an interrupt at the very end of the commit.
    """
    straight = Watching(RECIPE)
    fit(straight, tmp_path, strategy_in(tmp_path / "straight", overlap=overlap), max_steps=4)
    strategy = strategy_in(tmp_path, overlap=overlap)

    class Interrupted(Watching):
        def on_train_batch_start(self, *args: Any) -> None:
            handler = self.trainer.strategy._training_optimizer.rank_state.handler
            owner = handler._store if done == "record" else handler
            if self.trainer.global_step == 1 and not hasattr(self, "commit"):
                self.commit = owner.commit

                def interrupted(**settings: Any) -> None:
                    self.commit(**settings)
                    owner.commit = self.commit
                    raise KeyboardInterrupt

                owner.commit = interrupted

    module = Interrupted(RECIPE)
    trainer = quiet_trainer(tmp_path, strategy, max_steps=2)
    with suppress(KeyboardInterrupt, SystemExit):
        trainer.fit(module)
    strategy.drain()
    assert hasattr(module, "commit")
    committed = strategy._training_optimizer.rank_state.handler.generation
    assert torch.equal(residual_of(strategy), straight.seen[committed])


def test_a_damaged_payload(tmp_path: Path) -> None:
    """Damage between the update and the commit ends training with our own error, and the state is lost."""
    strategy = strategy_in(tmp_path)

    class Damaging(Watching):
        def on_train_batch_start(self, *args: Any) -> None:
            if self.trainer.global_step == 1:
                state = self.trainer.strategy._training_optimizer.rank_state
                commit = state.handler._store.commit

                def damaging(**settings: Any) -> None:
                    state.compressed._payloads.tensor[4] ^= 1  # flips a bit of the version in the first header
                    commit(**settings)

                state.handler._store.commit = damaging

    with pytest.raises(StorageError, match=r"cannot be kept.*version.*resume from a checkpoint"):
        fit(Damaging(RECIPE), tmp_path, strategy, max_steps=3)
    with pytest.raises(StorageError, match="is lost"):
        _ = strategy._training_optimizer.rank_state.handler


def test_no_memory_to_keep_what_was_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Running out of memory raises our own error."""

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("std::bad_alloc")

    monkeypatch.setattr(native, "feed_back", fail)
    with pytest.raises(StorageError, match=r"cannot be kept: std::bad_alloc.*resume from a checkpoint"):
        fit(LitTiny(RECIPE), tmp_path, strategy_in(tmp_path), max_steps=1)


def test_memory_is_reported(tmp_path: Path) -> None:
    """The strategy reports the payloads and, with error feedback, four bytes of residual per parameter."""
    for error_feedback in (True, False):
        strategy = strategy_in(tmp_path / str(error_feedback), error_feedback=error_feedback)
        held: dict[str, int] = {}

        class Asking(LitTiny):
            def on_train_end(self) -> None:
                held.update(self.trainer.strategy.host_bytes)  # noqa: B023  called within this pass

        fit(Asking(RECIPE), tmp_path, strategy, max_steps=1)
        assert held.get("residual", 0) == (4 * strategy.state_numel if error_feedback else 0)
        assert 0 < held["payloads"] < 4 * strategy.state_numel


def test_checkpoint_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A residual that the checkpoint lacks begins at zero, and one that is not needed is left out.

    Both log a warning.
    """
    saved = {}
    for name, error_feedback in (("with", True), ("without", False)):
        trainer = quiet_trainer(
            tmp_path / name, strategy_in(tmp_path / name, error_feedback=error_feedback), max_steps=2
        )
        trainer.fit(LitTiny(RECIPE))
        saved[name] = tmp_path / name / "half.ckpt"
        trainer.save_checkpoint(saved[name])
        trainer.strategy.close()
    module = Watching(RECIPE)
    quiet_trainer(tmp_path, strategy_in(tmp_path), max_steps=3).fit(module, ckpt_path=str(saved["without"]))
    assert not module.seen[0].any() and module.seen[1].any()
    (said,) = (record for record in caplog.records if "residual" in record.message)
    assert said.levelno == logging.WARNING and "begins at zero: the checkpoint gives none" in said.message
    strategy = strategy_in(tmp_path, error_feedback=False)
    quiet_trainer(tmp_path, strategy, max_steps=3).fit(LitTiny(RECIPE), ckpt_path=str(saved["with"]))
    assert "residual of compressed gradients is left out" in caplog.text


def test_host_says_that_there_is_no_gain(tmp_path: Path) -> None:
    """Compression on the host device gives a warning."""
    with pytest.warns(UserWarning, match=r"TopK\(ratio=0\.05.*is predicted to bring no gain.*host memory"):
        fit(LitTiny(RECIPE), tmp_path, strategy_in(tmp_path), max_steps=1)
