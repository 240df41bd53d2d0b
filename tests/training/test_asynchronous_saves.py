"""Checkpoints that are saved beside the training have the bytes of those that it waits for, and change nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param, safe_set_full_optimizer_state

from lightning_smartinfinity.devices.base import Traffic
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.training.asynchronous_worker import (
    NUM_STEPS,
    SAVE_AT,
    Progress,
    SaveTwice,
    Turns,
    contents,
    one_name,
    save_beside,
    saves_of,
    train,
)

NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
IN_BF16 = {"precision": "bf16-mixed"}
WITHOUT_EPS: dict[str, Any] = {"optimizer": "SGD", "eps": None}
CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"state_format": "bf16", "recipe": IN_BF16},
    "int8": {"state_format": "int8", "recipe": IN_BF16},
    "int8_remainder": {"state_format": "int8_remainder", "recipe": IN_BF16},
    "SGD with momentum": {"recipe": {**WITHOUT_EPS, "optimizer_kwargs": {"momentum": 0.9}}},
    "SGD": {"recipe": WITHOUT_EPS},
    "RMSprop": {"recipe": {"optimizer": "RMSprop", "optimizer_kwargs": {"centered": True}}},
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward", "recipe": {"frozen": True}},
    "parameters on storage": {"zero": NVME, "recipe": IN_BF16},
    "parameters on storage, backward": {"zero": NVME, "overlap": "backward", "recipe": IN_BF16},
    "DRAM tier": {"transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
    "several folders": {"folders": 3, "overlap": "forward", "recipe": {"scheduler": "step", "groups": True}},
    "accumulation, clipping": {"recipe": {"accumulate": 2, "clip": 0.3}, "trainer": {"gradient_clip_val": 0.3}},
    "fp16, skipped steps": {"recipe": {"precision": "16-mixed", "nan_at": (1, SAVE_AT, SAVE_AT + 2)}},
    "validation": {"recipe": {"validate": True}, "trainer": {"val_check_interval": 2}, "overlap": "forward"},
    "page cache": {"transfer": {"io_engine": "plain"}},
    "weights only": {"weights_only": True, "state_format": "int8", "recipe": IN_BF16},
}
USUAL = ("int8", "parameters on storage, backward", "several folders", "weights only")


@pytest.mark.parametrize("name", long_but(USUAL, CASES))
def test_a_save_beside_training_equals_one_that_training_waits_for(name: str, tmp_path: Path) -> None:
    """With a step between any two windows, each file is the same to the byte, and so is the rest of the training."""
    settings, turns = dict(CASES[name]), Turns()
    save = SaveTwice(tmp_path, weights_only=settings.pop("weights_only", False))
    with turns.taken():
        losses = train(tmp_path, turns, save, Progress(tmp_path / "beside"), **settings)
    assert turns.num_windows > 2 or name == "SGD", "training did not go on beside the save"
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    assert losses == train(tmp_path / "plain", **settings)
    assert contents(tmp_path / "end") == contents(tmp_path / "plain/end")


def test_a_save_of_two_processes_equals_one_that_they_wait_for(tmp_path: Path) -> None:
    """Both processes' files are the same to the byte."""
    done = run_module("tests.training.asynchronous_worker", tmp_path, "2", "equal", ranks=2)
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"rank-{rank}.json").read_text())["num_windows"] > 1
    assert len(contents(tmp_path / "beside")) > 4
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


def write_from_outside(trainer: pl.Trainer, root: Path) -> None:
    """Change a master and a moment."""
    weight: Any = trainer.lightning_module.model.blocks[0].up.weight
    master = safe_get_full_fp32_param(weight)
    safe_set_full_fp32_param(weight, 2 * master)
    safe_set_full_optimizer_state(weight, torch.ones_like(master), "exp_avg")


def load(trainer: pl.Trainer, root: Path) -> None:
    """Go back to the checkpoint of before."""
    trainer.strategy.load_checkpoint(root / "waited")


def save_own(trainer: pl.Trainer, root: Path) -> None:
    """Save without ModelCheckpoint, which is whole at once."""
    with one_name():
        trainer.save_checkpoint(root / "own")
    assert (root / "own/checkpoint").is_dir()


def export(trainer: pl.Trainer, root: Path) -> None:
    """Save the weights."""
    trainer.strategy.save_pretrained(root / "exported")  # type: ignore[attr-defined]


def evict(trainer: pl.Trainer, root: Path) -> None:
    """Wait for the step, and ask for more of the state than a step does."""
    trainer.strategy.drain()  # type: ignore[attr-defined]
    weight: Any = trainer.lightning_module.model.tokens.weight
    assert safe_get_full_fp32_param(weight) is not None


MEANWHILE = {action.__name__: action for action in (write_from_outside, load, save_own, export, evict)}


class Meanwhile(pl.Callback):
    """Does something in the step after the save."""

    def __init__(self, action: Callable[[pl.Trainer, Path], None], root: Path) -> None:
        self.action, self.root = action, root

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == SAVE_AT + 1:
            self.action(trainer, self.root)


@pytest.mark.parametrize(
    ("action", "overlap"),
    long_but(
        [("write_from_outside", "forward"), ("load", "forward")],
        [(name, overlap) for name in MEANWHILE for overlap in ("forward", "backward")],
    ),
)
def test_what_happens_beside_a_save_changes_nothing_in_it(action: str, overlap: str, tmp_path: Path) -> None:
    """The files are those of a save that training waits for, and the training is as it is without one."""
    turns, plain = Turns(), tmp_path / "plain"
    with turns.taken():
        does = Meanwhile(MEANWHILE[action], tmp_path)
        losses = train(tmp_path, turns, SaveTwice(tmp_path), does, overlap=overlap)
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")
    does = Meanwhile(MEANWHILE[action], plain)
    assert losses == train(plain, SaveTwice(plain, beside=False), does, overlap=overlap)
    for folder in ("end", "own", "exported"):
        assert contents(tmp_path / folder) == contents(plain / folder)


def test_a_save_of_the_last_step(tmp_path: Path) -> None:
    """The fit that ends within the save returns when it is whole."""
    turns = Turns()

    class Look(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            assert not (tmp_path / "beside").exists()

    with turns.taken():
        train(tmp_path, Look(), turns, SaveTwice(tmp_path, at=NUM_STEPS))
    assert contents(tmp_path / "beside") == contents(tmp_path / "waited")


def test_two_saves_with_a_skipped_step_between_them(tmp_path: Path) -> None:
    """Both are of one generation, so the second does not wait for the first; both are as if training had waited."""
    recipe = {"precision": "16-mixed", "nan_at": (SAVE_AT,)}

    class Save(pl.Callback):
        def __init__(self, root: Path, *, beside: bool) -> None:
            self.root, self.beside = root, beside

        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step in (SAVE_AT, SAVE_AT + 1):
                path = self.root / f"{trainer.global_step}"
                with one_name():
                    (save_beside if self.beside else pl.Trainer.save_checkpoint)(trainer, path)
                assert not self.beside or saves_of(trainer).will_exist(self.root / f"{SAVE_AT}")

    turns, plain = Turns(), tmp_path / "plain"
    with turns.taken():
        train(tmp_path, turns, Save(tmp_path, beside=True), recipe=recipe)
    train(plain, Save(plain, beside=False), recipe=recipe)
    for name in (f"{SAVE_AT}", f"{SAVE_AT + 1}", "end"):
        assert contents(tmp_path / name) == contents(plain / name)


class Counting(pl.Callback):
    """Keeps the counters of the training, and those of one save that it waits for."""

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        strategy.drain()
        saves_of(trainer).finish()
        self.counted: Traffic = strategy.traffic()
        trainer.save_checkpoint(trainer.default_root_dir + "/last")
        self.saved: Traffic = strategy.traffic() - self.counted


@pytest.mark.usefixtures("activations_as_asked")
def test_reads_of_a_save_have_a_counter_of_their_own(tmp_path: Path) -> None:
    """They are those of a save that training waits for; all other bytes are those of a training without a save."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == SAVE_AT:
                save_beside(trainer, tmp_path / "beside")

    beside, plain = Counting(), Counting()
    train(tmp_path, Save(), beside, overlap="none")
    train(tmp_path / "plain", plain, overlap="none")
    assert beside.counted.background_read_bytes == beside.saved.shared_read_bytes > 0
    assert plain.counted.background_read_bytes == beside.saved.background_read_bytes == 0
    for name in ("numel", "shared_read_bytes", "shared_write_bytes", "storage_write_bytes", "read_calls"):
        assert getattr(beside.counted, name) == getattr(plain.counted, name), name
