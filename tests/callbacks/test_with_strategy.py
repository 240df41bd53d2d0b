"""The monitor with the real strategy, in processes of their own."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from lightning_smartinfinity import SmartInfinityStrategy, StorageTrafficMonitor
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer

PAGE = 4096
NUM_STEPS = 6


class Witness(pl.Callback):
    """A callback that records this rank's counters."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy: Any = trainer.strategy
        self.seen["traffic"] = dataclasses.asdict(strategy.traffic())
        self.seen["state_numel"] = strategy.state_numel


def train(out: Path, devices: str = "1", resume: str | None = None) -> dict[str, Any]:
    """Train with the monitor and save a checkpoint; return what this rank saw."""
    monitor, witness = StorageTrafficMonitor(), Witness()
    trainer = quiet_trainer(
        out,
        SmartInfinityStrategy(out / "storage", overlap="none"),  # a measurement has all bytes of its steps
        devices=int(devices),
        max_steps=12 if resume else 6,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=[witness, monitor],
        logger=CSVLogger(out, name="logs", version=0),
    )
    recipe = Recipe(precision="bf16-mixed", accumulate=2)
    trainer.fit(LitTiny(recipe), recipe.loader(), recipe.loader(), ckpt_path=resume)
    trainer.save_checkpoint(out / "saved.ckpt")
    return {**witness.seen, "summary": monitor.summary}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """Train in one process and return its folder and values."""
    folder = tmp_path_factory.mktemp("alone")
    return folder, on_ranks(train, folder, ranks=1)


@pytest.mark.parametrize("devices", [1, 2])
def test_values_are_those_of_the_strategy_on_all_ranks(devices: int, alone: Any, tmp_path: Path) -> None:
    """After six steps every rank has the same values, which follow from the state's layout on storage."""
    folder, ranks = alone if devices == 1 else (tmp_path, on_ranks(train, tmp_path, "2"))
    summary = ranks[0]["summary"]
    assert all(rank["summary"] == summary for rank in ranks)
    moved = sum(extent_bytes(rank["state_numel"]) for rank in ranks)
    numel = sum(rank["state_numel"] for rank in ranks)
    assert summary["io/shared_read_GB"] == pytest.approx(moved / 1e9)
    assert summary["io/shared_write_GB"] == pytest.approx(moved / 1e9)
    assert summary["io/internal_write_GB"] == 0
    assert summary["io/bytes_per_parameter"] == pytest.approx(2 * moved / numel)
    written = sum(rank["traffic"]["shared_write_bytes"] for rank in ranks)
    assert summary["io/written_TB"] == pytest.approx(written / 1e12)
    assert summary["io/projected_TB"] == pytest.approx(written / 1e12)
    assert summary["io/GBps"] > 0
    assert 0 < summary["io/wait_share"] < 1
    assert_logged(folder, summary)


def test_resume_in_a_new_process(alone: Any, tmp_path: Path) -> None:
    """Totals continue from the checkpoint, and values of a step do not change."""
    folder, (first,) = alone
    (second,) = on_ranks(train, tmp_path, "1", folder / "saved.ckpt", ranks=1)
    own = second["traffic"]["shared_write_bytes"] / 1e12
    assert second["summary"]["io/written_TB"] == pytest.approx(first["summary"]["io/written_TB"] + own)
    assert second["summary"]["io/shared_write_GB"] == pytest.approx(first["summary"]["io/shared_write_GB"])


def extent_bytes(numel: int) -> int:
    """Return the bytes of one tasklet of fp32 Adam.

    Each of three arrays is padded to a page, and another page ends in the trailer.
    """
    return 3 * (-(-4 * numel // PAGE) * PAGE) + PAGE


def assert_logged(folder: Path, summary: dict[str, Any]) -> None:
    with (folder / "logs" / "version_0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["io/written_TB"]]
    assert [int(row["step"]) for row in rows] == [1, 3, 5, NUM_STEPS]
    for row in rows[:-1]:
        assert float(row["io/bytes_per_parameter"]) == pytest.approx(summary["io/bytes_per_parameter"])
    assert float(rows[-1]["io/written_TB"]) == pytest.approx(summary["io/written_TB"])
