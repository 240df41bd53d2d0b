"""The monitor in a real Trainer, with a strategy that counts known numbers of bytes and with ours; metrics."""

from __future__ import annotations

import copy
import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.devices import FolderTraffic, Traffic
from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.trainer.callbacks import StorageTrafficMonitor
from lightning_smartinfinity.integrations.trainer.metrics import (
    _COUNTS,
    _SECONDS,
    BytesPerParameter,
    Phase,
    StorageBandwidth,
    StorageBytes,
    StorageCounters,
    StorageWait,
    traffic_between,
)
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer

PER_STEP = Traffic(
    steps=1,
    numel=1_000,
    shared_read_bytes=12_000,
    shared_write_bytes=14_000,
    internal_read_bytes=1_000,
    internal_write_bytes=500,
    storage_write_bytes=12_500,  # excludes writes to a device's memory
    cached_read_bytes=3_000,
    cached_write_bytes=2_000,
    background_read_bytes=6_000,
    read_calls=3,
    write_calls=4,
    read_seconds=0.5,
    write_seconds=0.75,
    compute_seconds=0.25,
    wait_seconds=0.125,
    io_cpu_seconds=0.0625,
    gradient_wait_seconds=0.5,
    folders=(
        FolderTraffic(read_bytes=100, write_bytes=200, busy_seconds=2.0),
        FolderTraffic(read_bytes=500, write_bytes=400, busy_seconds=1.0),
    ),
)
INITIALISATION = Traffic(
    shared_write_bytes=12_000_000, storage_write_bytes=12_000_000, folders=(FolderTraffic(), FolderTraffic())
)
CHECKPOINT = Traffic(shared_read_bytes=9_000_000, wait_seconds=60.0)


class CountingStrategy(SingleDeviceStrategy):
    """Plain training in which every optimizer step, checkpoint and fit counts a known number of bytes."""

    def __init__(self, skipped_steps: tuple[int, ...] = ()) -> None:
        super().__init__(device="cpu")
        self.skipped_steps = skipped_steps
        self.num_steps = 0
        self.counted = Traffic()

    def traffic(self) -> Traffic:
        return self.counted

    @property
    def host_bytes(self) -> dict[str, int]:
        return {"ring": 3_000, "residual": 1_000}

    def drain(self) -> None:
        """Do nothing, since nothing runs beside training."""

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        self.counted = INITIALISATION  # counters restart with every store

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(*args, **kwargs)
        if self.num_steps not in self.skipped_steps:
            self.counted = self.counted + PER_STEP
        self.num_steps += 1
        return result

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.counted = self.counted + CHECKPOINT
        super().save_checkpoint(*args, **kwargs)


class Clock:
    """A clock that advances only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Line(pl.LightningModule):
    """A model with one linear layer whose batches and validations take fixed time on the clock."""

    def __init__(self, clock: Clock | None = None, *, num_batches: int = 8, validation_seconds: float = 100.0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.clock = clock or Clock()
        self.num_batches = num_batches
        self.validation_seconds = validation_seconds

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.clock.now += 2.0
        loss: torch.Tensor = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.clock.now += self.validation_seconds

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(self.num_batches, 4)), batch_size=1)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.ones(1, 4)), batch_size=1)


# ---- values of the monitor


INITIALISATION_TB = 12e6 / 1e12


def build(
    tmp_path: Path,
    *,
    monitor: StorageTrafficMonitor | None = None,
    clock: Clock | None = None,
    skipped_steps: tuple[int, ...] = (),
    **settings: Any,
) -> tuple[pl.Trainer, StorageTrafficMonitor, list[dict[str, float]]]:
    """Return a Trainer, its monitor, and the values that this will have after each batch."""
    seen: list[dict[str, float]] = []

    def see(trainer: pl.Trainer, *_: Any) -> None:
        values = trainer.callback_metrics
        seen.append({name: float(value) for name, value in values.items() if name.startswith("io/")})

    monitor = monitor or StorageTrafficMonitor()
    monitor._clock = clock or Clock()
    options = {
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "limit_val_batches": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
        **settings,
    }
    callbacks = [monitor, LambdaCallback(on_train_batch_end=see), *options.pop("callbacks", [])]
    return pl.Trainer(strategy=CountingStrategy(skipped_steps), callbacks=callbacks, **options), monitor, seen


def assert_summary(monitor: StorageTrafficMonitor, expected: dict[str, float]) -> None:
    """Assert that a monitor's summary has these values."""
    assert {name: monitor.summary[f"io/{name}"] for name in expected} == pytest.approx(expected)


def test_values_of_one_step(tmp_path: Path) -> None:
    """Every documented metric is right for a step of two seconds with known traffic, also those of each folder."""
    clock = Clock()
    trainer, _, seen = build(tmp_path, monitor=StorageTrafficMonitor(endurance_tbw=1e-3), clock=clock)
    trainer.fit(Line(clock))
    projected = INITIALISATION_TB + 8 * 12_500 / 1e12
    assert seen[0] == pytest.approx(
        {
            "io/shared_read_GB": 12_000 / 1e9,
            "io/shared_write_GB": 14_000 / 1e9,
            "io/internal_read_GB": 1_000 / 1e9,
            "io/internal_write_GB": 500 / 1e9,
            "io/cached_read_GB": 3_000 / 1e9,
            "io/cached_write_GB": 2_000 / 1e9,
            "io/background_read_GB": 6_000 / 1e9,
            "io/GBps": 27_500 / 2.0 / 1e9,
            "io/wait_GBps": 27_500 / 0.125 / 1e9,
            "io/wait_s": 0.125,
            "io/gradient_wait_s": 0.5,
            "io/wait_share": 0.125 / 2.0,
            "io/compute_s": 0.25,
            "io/cpu_s_per_GiB": 0.0625 / 27_500 * 2**30,
            "io/bytes_per_parameter": 27.5,
            "io/shared_bytes_per_parameter": 26.0,
            "io/total_shared_read_TB": 12_000 / 1e12,
            "io/total_shared_write_TB": INITIALISATION_TB + 14_000 / 1e12,
            "io/total_internal_read_TB": 1_000 / 1e12,
            "io/total_internal_write_TB": 500 / 1e12,
            "io/written_TB": INITIALISATION_TB + 12_500 / 1e12,
            "io/projected_TB": projected,
            "io/endurance_share": projected / 1e-3,
            "io/host_GB": 4_000 / 1e9,
            "io/residual_GB": 1_000 / 1e9,
            "io/folder0_GB": 300 / 1e9,
            "io/folder0_share": 0.25,
            "io/folder0_GBps": 150 / 1e9,
            "io/folder1_GB": 900 / 1e9,
            "io/folder1_share": 0.75,
            "io/folder1_GBps": 900 / 1e9,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("settings", "first", "steps", "values"),
    [
        ({"log_every_n_steps": 4}, 3, 8, {"io/shared_write_GB": 14_000 / 1e9, "io/GBps": 27_500 / 2.0 / 1e9}),
        ({"log_every_n_steps": 4, "every_n_steps": 2}, 1, 8, {"io/wait_s": 0.125}),
        ({"log_every_n_steps": 4, "every_n_steps": 8}, 7, 8, {"io/wait_s": 0.125}),
        ({"accumulate_grad_batches": 4}, 3, 2, {"io/shared_read_GB": 12_000 / 1e9, "io/GBps": 27_500 / 8.0 / 1e9}),
        ({"max_epochs": -1, "max_steps": 4}, 0, 4, {}),
        ({"max_epochs": 3, "max_steps": 4}, 0, 4, {}),
        ({"max_epochs": 2}, 0, 16, {}),
        ({"max_epochs": 2, "accumulate_grad_batches": 4}, 3, 4, {}),
    ],
)
def test_cadence_and_projection(
    tmp_path: Path, settings: dict[str, int], first: int, steps: int, values: dict[str, float]
) -> None:
    """Values are of the optimizer steps since the last measurement, at the loggers' cadence or the monitor's own.

    From the first measurement on the projection is the bytes that the whole run will have written.
    """
    clock, options = Clock(), dict(settings)
    monitor = StorageTrafficMonitor(every_n_steps=options.pop("every_n_steps", None))
    trainer, _, seen = build(tmp_path, monitor=monitor, clock=clock, logger=CSVLogger(tmp_path), **options)
    trainer.fit(Line(clock))
    measured = [index for index, found in enumerate(seen) if found]
    assert measured[0] == first and measured == [*range(first, len(seen))]
    written = INITIALISATION_TB + steps * 12_500 / 1e12
    assert [seen[index]["io/projected_TB"] for index in measured] == pytest.approx([written] * len(measured))
    assert monitor.summary["io/projected_TB"] == monitor.summary["io/written_TB"] == pytest.approx(written)
    assert {name: monitor.summary[name] for name in values} == pytest.approx(values)
    assert {name: seen[-1][name] for name in values} == pytest.approx(values)


def test_skipped_steps(tmp_path: Path) -> None:
    """A skipped step moves nothing: bytes per parameter stay the same, bytes per step fall."""
    trainer, monitor, seen = build(tmp_path, skipped_steps=(0, 5))
    trainer.fit(Line())
    assert_summary(monitor, {"bytes_per_parameter": 27.5, "shared_read_GB": 12_000 / 1e9 * 6 / 8})
    assert math.isnan(seen[0]["io/bytes_per_parameter"]) and seen[0]["io/shared_read_GB"] == 0


def test_validation_and_checkpoints_between_steps(tmp_path: Path) -> None:
    """Their traffic counts in the totals, but not in the values of a step."""
    clock = Clock()
    checkpoints = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_top_k=-1)
    trainer, monitor, _ = build(
        tmp_path,
        clock=clock,
        callbacks=[checkpoints],
        enable_checkpointing=True,
        limit_val_batches=1,
        val_check_interval=3,
    )
    trainer.fit(Line(clock))
    assert len(list((tmp_path / "saved").iterdir())) == 4
    # The fourth checkpoint falls on the last batch, so that its traffic is counted at the end of training.
    in_all = {"total_shared_read_TB": (8 * 12_000 + 4 * 9_000_000) / 1e12}
    assert_summary(monitor, {"shared_read_GB": 12_000 / 1e9, "wait_s": 0.125, "GBps": 27_500 / 2.0 / 1e9, **in_all})


def test_second_fit_of_one_trainer(tmp_path: Path) -> None:
    """Each fit counts from the beginning and projects only what remains."""
    trainer, monitor, _ = build(tmp_path)
    for epochs, steps in ((1, 8), (3, 16)):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(Line())
        written = INITIALISATION_TB + steps * 12_500 / 1e12
        assert_summary(monitor, {"written_TB": written, "projected_TB": written})


def test_saved_totals_stand_for_all_ranks() -> None:
    """Before any fit the monitor saves the totals that it loaded."""
    monitor = StorageTrafficMonitor()
    saved = dict.fromkeys(monitor.state_dict(), 2**60)
    monitor.load_state_dict(saved)
    assert monitor.state_dict() == saved


def test_run_without_an_end(tmp_path: Path) -> None:
    """A run without a limit has no projection."""
    stop = LambdaCallback(
        on_train_batch_end=lambda trainer, *_: setattr(trainer, "should_stop", trainer.global_step >= 20)
    )
    trainer, monitor, _ = build(tmp_path, max_epochs=-1, callbacks=[stop])
    trainer.fit(Line())
    assert "io/projected_TB" not in monitor.summary and monitor.summary["io/written_TB"] > 0


@pytest.mark.parametrize("prog_bar", [True, False])
def test_progress_bar(tmp_path: Path, prog_bar: bool) -> None:
    """The progress bar shows bandwidth and waiting unless turned off, and no other metric."""
    trainer, _, _ = build(tmp_path, monitor=StorageTrafficMonitor(prog_bar=prog_bar))
    trainer.fit(Line())
    shown = {name for name in trainer.progress_bar_metrics if name.startswith("io/")}
    assert shown == ({"io/GBps", "io/wait_s"} if prog_bar else set())


@pytest.mark.parametrize("settings", [{"fast_dev_run": True}, {"log_every_n_steps": 0}, {"max_steps": 0}, {}])
@pytest.mark.filterwarnings("error:.*(io/|logger|sync_dist|batch_size)")
def test_runs_that_log_little_or_nothing(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Such runs, and one without a logger, end as they would without the monitor, which causes no warning."""
    trainer, _, _ = build(tmp_path, **settings)
    trainer.fit(Line())
    assert trainer.state.finished


def test_strategy_without_storage(tmp_path: Path) -> None:
    """The error names the strategy and the one to use instead. The monitor does nothing in an evaluation."""
    options: dict[str, Any] = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(callbacks=[StorageTrafficMonitor()], default_root_dir=tmp_path, **options)
    trainer.validate(Line(), verbose=False)
    assert trainer.state.finished
    with pytest.raises(UnsupportedError, match=r"SingleDeviceStrategy.*smart_infinity"):
        trainer.fit(Line())


def test_cadence_that_loggers_would_miss(tmp_path: Path) -> None:
    """The error names both cadences."""
    trainer, _, _ = build(
        tmp_path,
        monitor=StorageTrafficMonitor(every_n_steps=3),
        logger=CSVLogger(tmp_path),
        log_every_n_steps=4,
    )
    with pytest.raises(ConfigError, match=r"every_n_steps=3.*log_every_n_steps=4"):
        trainer.fit(Line())


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("every_n_steps", value) for value in (0, -1, 1.5, True, "4")),
        *(("endurance_tbw", value) for value in (0, -600.0, "600", math.nan, True)),
    ],
)
def test_bad_settings(setting: str, value: Any) -> None:
    """The error names the setting and the value."""
    with pytest.raises(ConfigError, match=f"{setting}="):
        StorageTrafficMonitor(**{setting: value})


ONE = Traffic(
    steps=1,
    numel=100,
    shared_read_bytes=800,
    shared_write_bytes=1200,
    internal_read_bytes=40,
    internal_write_bytes=60,
    cached_read_bytes=7,
    cached_write_bytes=11,
    wait_seconds=0.5,
)
TWO = Traffic(steps=1, numel=300, shared_read_bytes=2400, shared_write_bytes=3600, wait_seconds=1.5)


def test_between_two_readings() -> None:
    """Every counter is the difference of the two readings; counters that restarted count since then.

    Every counter of Traffic has a column, except system calls; folders have columns of their own.
    """
    assert {*_COUNTS, *_SECONDS} == {field.name for field in dataclasses.fields(Traffic)} - {"system_calls", "folders"}
    assert traffic_between(ONE, ONE + TWO) == TWO
    assert traffic_between(ONE, Traffic(shared_write_bytes=5)) == Traffic(shared_write_bytes=5)


@pytest.mark.parametrize(
    ("metric", "on_one", "on_two"),
    [
        (StorageBytes(), 2100 + 2 * 6000, 2100 + 2 * 6000),
        (StorageBytes("shared"), 2000 + 2 * 6000, 2000 + 2 * 6000),
        (StorageBytes("shared", "read"), 800 + 2 * 2400, 800 + 2 * 2400),
        (StorageBytes("internal"), 100, 100),
        (StorageBytes("internal", "write"), 60, 60),
        (StorageBytes("all", "read"), 840 + 2 * 2400, 840 + 2 * 2400),
        (StorageBytes("cached"), 7 + 11, 7 + 11),
        (StorageBytes("cached", "write"), 11, 11),
        (StorageBandwidth("shared", "write"), 4800 / (2.0 + 3.0), 4800 / 3.0),
        (StorageBandwidth("shared", "write", "wait"), 4800 / (0.5 + 1.5), 4800 / 1.5),
        (StorageWait(), 0.5 + 1.5, 1.5),
        (StorageWait("mean"), 0.5 + 1.5, 1.0),
        (BytesPerParameter("shared"), 8000 / 400, 8000 / 400),
    ],
)
def test_values(metric: StorageCounters, on_one: float, on_two: float) -> None:
    """Bytes add up over updates and ranks, the slowest rank's time counts, and only bytes count beside steps.

    Torchmetrics stacks the states of ranks; a test below has two of them.
    """
    alone, first, second = (copy.deepcopy(metric) for _ in range(3))
    for one, other in ((alone, alone), (first, second)):
        one.update(ONE, seconds=2.0)
        other.update(TWO, seconds=3.0)
        one.update(TWO, seconds=100.0, phase=Phase.OTHER)
    first.counters = torch.stack([first.counters, second.counters])
    assert alone.compute().item() == pytest.approx(on_one) and first.compute().item() == pytest.approx(on_two)


def test_storage_folders() -> None:
    """Bytes of a folder add up over ranks. Its bandwidth uses the longest busy time of a rank."""
    first, second = (StorageCounters(num_folders=2) for _ in range(2))
    slow = FolderTraffic(read_bytes=100, write_bytes=200, busy_seconds=3.0)
    fast = FolderTraffic(read_bytes=1000, write_bytes=500, busy_seconds=1.0)
    first.update(Traffic(steps=1, folders=(slow, fast)))
    first.update(Traffic(folders=(slow, fast)), phase=Phase.OTHER)
    second.update(Traffic(steps=1, folders=(slow, slow)))
    second.update(Traffic(numel=1))  # from storage that is closed
    computed = [first.compute(), second.compute()]
    first.update(Traffic(steps=1))  # which changes no earlier result
    table = StorageCounters.table(torch.cat(computed), Phase.STEP)
    assert table.folder_bytes().tolist() == [600, 1800] and table.folder_bandwidth().tolist() == [200.0, 600.0]
    assert table.column("steps").tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counters_stay_exact(dtype: torch.dtype) -> None:
    """They go beyond the whole numbers of float64, also in a module that is converted to 16 bit."""
    module = nn.ModuleDict({"bytes": StorageBytes(), "wait": StorageWait()})
    for traffic in (Traffic(shared_write_bytes=2**53, wait_seconds=1.000000001), Traffic(shared_write_bytes=1)):
        for metric in module.values():
            metric.update(traffic)
    module.to(dtype)
    assert module["bytes"].compute().item() == 2**53 + 1 and module["wait"].compute().item() == 1.000000001


def test_nothing_updated() -> None:
    """Without elements or time the value is NaN."""
    for metric in (BytesPerParameter(), StorageBandwidth()):
        metric.update(Traffic())
        assert math.isnan(metric.compute().item())


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: StorageBytes(channel="pcie"), "channel='pcie'"),
        (lambda: StorageBytes(direction="up"), "direction='up'"),
        (lambda: StorageBandwidth(per="cpu"), "per='cpu'"),
        (lambda: StorageWait(over_ranks="sum"), "over_ranks='sum'"),
        (lambda: BytesPerParameter(channel=""), "channel=''"),
    ],
)
def test_unknown_choice(build: object, named: str) -> None:
    """The error names the value and the choices."""
    with pytest.raises(ConfigError, match=rf"{named}.*Use one of: "):
        build()  # type: ignore[operator]


# ---- the monitor with the real strategy, in processes of their own


PAGE = 4096
NUM_STEPS = 6


def train(out: Path, devices: str = "1", resume: str | None = None) -> dict[str, Any]:
    """Train with the monitor and save a checkpoint; return what this rank saw, and its own counters."""
    monitor = StorageTrafficMonitor()
    strategy = SmartInfinityStrategy(out / "storage", overlap="none")  # a measurement has all bytes of its steps
    trainer = quiet_trainer(
        out,
        strategy,
        devices=int(devices),
        max_steps=12 if resume else 6,
        accumulate_grad_batches=2,
        log_every_n_steps=2,
        val_check_interval=4,
        limit_val_batches=1,
        callbacks=[monitor],
        logger=CSVLogger(out, name="logs", version=0),
    )
    recipe = Recipe(precision="bf16-mixed", accumulate=2)
    trainer.fit(LitTiny(recipe), recipe.loader(), recipe.loader(), ckpt_path=resume)
    traffic = dataclasses.asdict(strategy.traffic())
    trainer.save_checkpoint(out / "saved.ckpt")
    return {"traffic": traffic, "state_numel": strategy.state_numel, "summary": monitor.summary}


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
    written = sum(rank["traffic"]["shared_write_bytes"] for rank in ranks)
    expected = {
        "io/shared_read_GB": moved / 1e9,
        "io/shared_write_GB": moved / 1e9,
        "io/internal_write_GB": 0,
        "io/bytes_per_parameter": 2 * moved / numel,
        "io/written_TB": written / 1e12,
        "io/projected_TB": written / 1e12,
    }
    assert {name: summary[name] for name in expected} == pytest.approx(expected)
    assert summary["io/GBps"] > 0 and 0 < summary["io/wait_share"] < 1
    assert_logged(folder, summary)


def test_resume_in_a_new_process(alone: Any, tmp_path: Path) -> None:
    """Totals continue from the checkpoint, and values of a step do not change."""
    folder, (first,) = alone
    (second,) = on_ranks(train, tmp_path, "1", folder / "saved.ckpt", ranks=1)
    own = {
        "io/shared_write_GB": 0,
        **dict.fromkeys(
            ("io/total_shared_write_TB", "io/written_TB", "io/projected_TB"),
            second["traffic"]["shared_write_bytes"] / 1e12,
        ),
    }
    expected = {name: first["summary"][name] + more for name, more in own.items()}
    assert {name: second["summary"][name] for name in own} == pytest.approx(expected)


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
