"""What a training with activations on storage counts, asks for and says, and forwards of unusual kinds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch

from lightning_smartinfinity import SmartInfinityStrategy, StorageTrafficMonitor
from lightning_smartinfinity.devices.base import Traffic
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.trainers import quiet_trainer
from tests.training.actions import does

pytestmark = pytest.mark.usefixtures("activations_as_asked")


def test_what_is_counted(tmp_path: Path) -> None:
    """Activations have counters of their own, and host memory while they train; only the wear includes their writes."""
    seen: list[Traffic] = []
    for activations in (None, EVERYTHING):
        held: list[int] = []
        strategy = SmartInfinityStrategy(tmp_path / "storage", activations=activations, overlap="none")
        looking = does(
            on_after_backward=lambda *_, held=held, strategy=strategy: held.append(
                strategy.host_bytes.get("activations", 0)
            )
        )
        monitor = StorageTrafficMonitor(every_n_steps=1, endurance_tbw=1.0)
        trainer = quiet_trainer(tmp_path, strategy, callbacks=[monitor, looking])
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
        seen.append(strategy.traffic())
        # The pool gives its memory back when the training is over.
        assert min(held) > 0 if activations else max(held) == 0
        assert strategy.host_bytes.get("activations") == (None if activations is None else 0)
        strategy.close()
        assert strategy.traffic() == Traffic()
    (plain, traffic), summary = seen, monitor.summary
    assert plain.activation_read_bytes == plain.activation_write_bytes == 0
    assert traffic.activation_read_bytes > 0 and traffic.activation_write_bytes > 0
    assert traffic.storage_write_bytes == plain.storage_write_bytes + traffic.activation_write_bytes
    assert traffic.activation_wait_seconds > 0
    for name in ("shared_read_bytes", "shared_write_bytes", "numel", "steps"):
        assert getattr(traffic, name) == getattr(plain, name), name
    assert summary["io/activation_write_GB"] == pytest.approx(traffic.activation_write_bytes / trainer.max_steps / 1e9)
    assert summary["io/activation_read_GB"] > 0 and summary["io/activation_wait_s"] > 0
    assert summary["io/bytes_per_parameter"] == pytest.approx(24, rel=0.5)
    assert summary["io/written_TB"] == pytest.approx(traffic.storage_write_bytes / 1e12)


class Manual(LitTiny):
    """A module whose backward runs within its training step, twice through each graph, while others are dropped."""

    automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for micro in range(2):
            tokens = self.recipe.batch(2 * batch_idx + micro)
            self.model(tokens)
            loss = self.model(tokens)
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


def checkpointed(checkpoint: Callable[..., Any]) -> LitTiny:
    """Return a module whose blocks run below the checkpoints of DeepSpeed or torch."""
    module = LitTiny(Recipe(precision="bf16-mixed"))
    for block in module.model.blocks:
        block.forward = partial(checkpoint, block.forward)
    return module


UNUSUAL: dict[str, Callable[[], LitTiny]] = {
    "two manual backwards": lambda: Manual(Recipe(precision="bf16-mixed")),
    "deepspeed": lambda: checkpointed(lambda *inputs: deepspeed.checkpointing.checkpoint(*inputs)),
    "reentrant": lambda: checkpointed(partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)),
    "not reentrant": lambda: checkpointed(partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_forwards(name: str, tmp_path: Path) -> None:
    """Backward may run within forward, twice, or never; inputs of checkpoints move, but for those DeepSpeed keeps."""
    seen = []
    for activations in (None, EVERYTHING):
        strategy = SmartInfinityStrategy(tmp_path / str(activations is None), activations=activations)
        module = UNUSUAL[name]()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            quiet_trainer(tmp_path, strategy).fit(module)
        seen.append(module.losses)
        said = [str(each.message) for each in told if "deepspeed.checkpointing keeps" in str(each.message)]
        assert len(said) == (name == "deepspeed" and activations is not None)
        if activations is not None:
            hidden = strategy.optimizers[0].rank_state.activations.hidden_bytes
            block_input = 2 * 2 * 16 * 32  # bytes, in bf16
            assert hidden == (3 * 2 * block_input if name == "deepspeed" else 0)
            assert strategy.traffic().activation_read_bytes > 0
        strategy.close()
    assert seen[0] == seen[1]


@pytest.mark.parametrize(("keep", "unmeasured"), [("auto", 7), (0, 0)])
def test_overlaps_are_measured_when_it_is_chosen_what_leaves(keep: int | str, unmeasured: int, tmp_path: Path) -> None:
    """With overlap="auto", the seven steps in which that is settled are not measured, unless the user has chosen."""
    modes: list[str] = []
    note = does(on_train_batch_end=lambda trainer, _: modes.append(trainer.strategy.optimizers[0].overlap.mode))
    strategy = SmartInfinityStrategy(tmp_path / "storage", activations={"min_bytes": 1, "keep": keep})
    quiet_trainer(tmp_path, strategy, max_steps=15, callbacks=[note]).fit(LitTiny(Recipe(precision="bf16-mixed")))
    assert modes[: unmeasured + 8] == (unmeasured + 4) * ["forward"] + 4 * ["backward"]
