"""Activations on storage change no bit of a training, wherever its state lies and whatever runs beside it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_smartinfinity import SmartInfinityStrategy, StorageFullError, StorageTrafficMonitor
from lightning_smartinfinity.devices.base import Traffic
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.trainers import quiet_trainer
from tests.training.test_overlap import CASES, SMALL_RING, assert_same, result, straight
from tests.training.worker import Run, launch, train

__all__ = ["straight"]

pytestmark = pytest.mark.usefixtures("activations_as_asked")


def run_of(root: Path, name: str, overlap: str, *, activations: Any = None, **settings: Any) -> Run:
    recipe, options = CASES[name]
    return Run(
        out=str(root),
        recipe=dataclasses.replace(recipe, **settings.pop("recipe", {})),
        transfer=SMALL_RING,
        options={**options, "overlap": overlap, "activations": activations},
        **settings,
    )


@pytest.mark.parametrize(
    ("name", "overlap"),
    long_but(
        [("32-true", "none"), ("32-true", "backward"), ("nvme", "forward"), ("nvme", "backward")],
        itertools.product(CASES, ["none", "forward", "backward"]),
    ),
)
def test_same_bits(name: str, overlap: str, straight: Callable[[str], Any], tmp_path: Path) -> None:
    """Accumulation, clipping, skipped steps, validation, unused and offloaded parameters: as with all in memory."""
    run = run_of(tmp_path, name, overlap, activations=EVERYTHING, delays=0, delay_us=300)
    assert_same(result(run), straight(name))


@pytest.mark.parametrize("overlap", long_but(["backward"], ["forward", "backward"]))
def test_two_processes(overlap: str, tmp_path: Path) -> None:
    """Each rank has a file and a pool of its own, and a step that one rank skips is skipped by both."""
    recipe = {"validate": False, "nan_rank": 1}
    runs = [
        run_of(tmp_path / "memory", "bf16-mixed", "none", devices=2, recipe=recipe),
        run_of(tmp_path / "storage", "bf16-mixed", overlap, activations=EVERYTHING, devices=2, delays=0, recipe=recipe),
    ]
    memory, storage = launch(*runs)
    assert (storage.losses, storage.extra) == (memory.losses, memory.extra)
    assert all(torch.equal(storage.masters[name], master) for name, master in memory.masters.items())


def counted(root: Path, activations: Any) -> tuple[Any, Traffic]:
    """Train and return the result, and the traffic of the training."""
    module, trainer, recorder = train(run_of(root, "32-true", "none", activations=activations))
    strategy: Any = trainer.strategy
    traffic = strategy.traffic()
    # The pool gives its memory back when the training is over.
    assert strategy.host_bytes.get("activations") == (None if activations is None else 0)
    strategy.close()
    assert strategy.traffic() == Traffic()
    return ((module.losses, module.validated, recorder.extra), recorder.masters), traffic


def test_what_is_counted(tmp_path: Path) -> None:
    """Activations have counters of their own: only the wear of the drive includes what is written of them."""
    without, plain = counted(tmp_path / "without", None)
    with_all, traffic = counted(tmp_path / "with", EVERYTHING)
    assert_same(with_all, without)
    assert plain.activation_read_bytes == plain.activation_write_bytes == 0
    assert traffic.activation_read_bytes > 0 and traffic.activation_write_bytes > 0
    assert traffic.storage_write_bytes == plain.storage_write_bytes + traffic.activation_write_bytes
    assert traffic.activation_wait_seconds > 0
    for name in ("shared_read_bytes", "shared_write_bytes", "numel", "steps"):
        assert getattr(traffic, name) == getattr(plain, name), name


def test_the_monitor(tmp_path: Path) -> None:
    """It reports activations by themselves, and counts what is written of them as wear."""
    monitor = StorageTrafficMonitor(every_n_steps=1, endurance_tbw=1.0)
    strategy = SmartInfinityStrategy(tmp_path / "storage", activations=EVERYTHING, overlap="none")
    trainer = quiet_trainer(tmp_path, strategy, callbacks=[monitor])
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
    summary, traffic = monitor.summary, strategy.traffic()
    assert summary["io/activation_write_GB"] == pytest.approx(traffic.activation_write_bytes / trainer.max_steps / 1e9)
    assert summary["io/activation_read_GB"] > 0 and summary["io/activation_wait_s"] > 0
    assert summary["io/bytes_per_parameter"] == pytest.approx(24, rel=0.5)
    assert summary["io/written_TB"] == pytest.approx(traffic.storage_write_bytes / 1e12)


def test_space_is_asked_for(tmp_path: Path) -> None:
    """What activations may take is asked for together with the state, before anything is written."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", activations={"storage_bytes": 1 << 60})
    with pytest.raises(StorageFullError, match="activations and the optimizer state need") as raised:
        quiet_trainer(tmp_path, strategy).fit(LitTiny(Recipe(precision="bf16-mixed")))
    assert "storage_bytes" in raised.value.remedy
    assert not (tmp_path / "storage").exists()


class Manual(LitTiny):
    """A module whose backward runs within its training step, twice through each graph; it may drop other graphs."""

    def __init__(self, recipe: Recipe, *, drops_graphs: bool = False) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False
        self.drops_graphs = drops_graphs

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for micro in range(2):
            tokens = self.recipe.batch(2 * batch_idx + micro)
            if self.drops_graphs:
                self.model(tokens)
            loss = self.model(tokens)
            self.losses.append(float(loss.detach()))
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("drops_graphs", [False, True])
def test_manual_optimization(drops_graphs: bool, tmp_path: Path) -> None:
    """Backward may run within the forward that is offloaded, twice through one graph, or never."""
    recipe = Recipe(precision="bf16-mixed", max_steps=4)
    seen = []
    for activations in (None, EVERYTHING):
        root = tmp_path / str(activations is None)
        strategy = SmartInfinityStrategy(root / "storage", activations=activations)
        module = Manual(recipe, drops_graphs=drops_graphs)
        quiet_trainer(root, strategy, max_steps=4).fit(module)
        assert activations is None or strategy.traffic().activation_read_bytes > 0
        strategy.close()
        seen.append(module.losses)
    assert seen[0] == seen[1]


class HostBytes(Callback):
    """Looks at the host memory of activations behind each backward."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.seen.append(trainer.strategy.host_bytes["activations"])


def test_the_pool_is_told(tmp_path: Path) -> None:
    """As long as a training runs, host_bytes tells how much memory the pool takes."""
    strategy, seen = SmartInfinityStrategy(tmp_path / "storage", activations=EVERYTHING), HostBytes()
    quiet_trainer(tmp_path, strategy, max_steps=3, callbacks=[seen]).fit(LitTiny(Recipe(precision="bf16-mixed")))
    assert min(seen.seen) > 0
    strategy.close()


def test_the_choice_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the defaults a micro-batch is measured, and one line says what is kept and offloaded."""
    strategy = SmartInfinityStrategy(tmp_path / "storage", activations={"min_bytes": 1})
    with caplog.at_level(logging.INFO, logger="lightning_smartinfinity"):
        quiet_trainer(tmp_path, strategy, max_steps=4).fit(LitTiny(Recipe(precision="bf16-mixed")))
    lines = [record.message for record in caplog.records if "that forward saves" in record.message]
    assert lines and "are offloaded and" in lines[0]


class Checkpointed(LitTiny):
    """A model that calls the checkpoints of DeepSpeed or torch."""

    def __init__(self, recipe: Recipe, checkpoint: Callable[..., Any]) -> None:
        super().__init__(recipe)
        for block in self.model.blocks:
            block.forward = partial(checkpoint, block.forward)


CHECKPOINTS: dict[str, Callable[..., Any]] = {
    "deepspeed": lambda *inputs: deepspeed.checkpointing.checkpoint(*inputs),
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "not reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoints(name: str, tmp_path: Path) -> None:
    """Their inputs move to storage, but for those that DeepSpeed keeps itself, which is said and counted."""
    seen = []
    for activations in (None, EVERYTHING):
        root = tmp_path / str(activations is None)
        strategy = SmartInfinityStrategy(root / "storage", activations=activations)
        module = Checkpointed(Recipe(precision="bf16-mixed"), CHECKPOINTS[name])
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            quiet_trainer(root, strategy).fit(module)
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

    class Note(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            modes.append(trainer.strategy.optimizers[0].overlap.mode)

    strategy = SmartInfinityStrategy(tmp_path / "storage", activations={"min_bytes": 1, "keep": keep})
    quiet_trainer(tmp_path, strategy, max_steps=15, callbacks=[Note()]).fit(LitTiny(Recipe(precision="bf16-mixed")))
    assert modes[: unmeasured + 8] == (unmeasured + 4) * ["forward"] + 4 * ["backward"]
