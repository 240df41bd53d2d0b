"""Bad input raises one of our own errors with a remedy and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from lightning_smartinfinity import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    SmartInfinityError,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    StorageError,
    StorageFullError,
    StorageLockedError,
    TransferConfig,
    UnsupportedError,
)
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.helpers import trainers
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT
from tests.training.worker import REPOSITORY


def fit(module: pl.LightningModule, strategy: SmartInfinityStrategy, root: Path, **trainer: Any) -> pl.Trainer:
    """Fit for one step in fp32."""
    return trainers.fit(module, root, strategy, **{"precision": "32-true", "max_steps": 1, **trainer})


def assert_helpful(error: SmartInfinityError, *values: str) -> None:
    """Assert that the message names the values at fault and ends in a remedy."""
    assert error.remedy.endswith("."), error
    for value in values:
        assert value in str(error), f"{value!r} is not named in: {error}"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"update_device": "fpga"}, "'fpga'"),
        ({"update_device": "smartssd"}, "'smartssd'"),
        ({"state_format": "int4"}, "'int4'"),
        ({"overlap": "sideways"}, "'sideways'"),
        ({"compression": object()}, "compression"),
        ({"activations": object()}, "activations"),
        ({"activations": True}, "activations"),
        ({"storage": []}, "[]"),
        ({"storage": ""}, "''"),
        ({"storage": ["/a", "/a"]}, "twice"),
        ({"storage": 3}, "3"),
        ({"storage": "s3://bucket/run"}, "a local folder on a drive"),
        ({"storage": Path("s3://bucket/run")}, "a local folder on a drive"),
        ({"storage": ["/a", "hdfs://host/run"]}, "is a URL"),
        ({"storage": "file:///nvme"}, "is a URL"),
        ({"zero": {"offload_param": {"nvme_path": "gs://bucket/run"}}}, "nvme_path': 'gs://bucket/run'"),
        ({"stage": 2}, "'stage'"),
        ({"offload_optimizer": True}, "'offload_optimizer'"),
        ({"zero": {"stage": 2}}, "'stage'"),
        ({"zero": {"offload_optimizer": {"device": "nvme"}}}, "offload_optimizer"),
        ({"zero": {"zero_hpz_partition_size": 2}}, "hpZ"),
        ({"zero": {"zero_quantized_weights": True}}, "quantized"),
        ({"zero": {"mics_shard_size": 2}}, "MiCS"),
        ({"zero": {"zenflow": {"topk_ratio": 0.1}}}, "ZenFlow"),
        ({"zero": 7}, "7"),
        ({"zero": {7: 1}}, "7"),
        ({"zero": {"reduce_bucket_size": (_ for _ in ())}}, "reduce_bucket_size"),
        ({"zero": {"offload_param": {"nvme_path": "a\0b"}}}, "nvme_path"),
        ({"storage": "a\0b"}, "null"),
        ({"storage": ["a", "~nobody-of-this-name/a"]}, "~nobody-of-this-name"),
        ({"loss_scale": -1.0}, "loss_scale=-1.0"),
        ({"loss_scale": float("nan")}, "nan"),
        ({"min_loss_scale": "1"}, "min_loss_scale='1'"),
        ({"min_loss_scale": Fraction(1, 3)}, "min_loss_scale=Fraction(1, 3)"),
        ({"initial_scale_power": 10**30}, "127"),
        ({"initial_scale_power": 16.0}, "int"),
        ({"loss_scale_window": 0}, "loss_scale_window=0"),
        ({"hysteresis": True}, "hysteresis=True"),
        ({"exclude_frozen_parameters": 1}, "bool"),
        ({"timeout": 60}, "timedelta"),
    ],
)
def test_unknown_or_contradictory_settings_raise_in_the_constructor(settings: dict[str, Any], named: str) -> None:
    """The constructor raises an error that begins with the class that was called, and names the value."""
    for strategy in (SmartInfinityStrategy, SmartInfinityFabricStrategy):
        with pytest.raises((ConfigError, UnsupportedError)) as caught:
            strategy(**settings)
        assert_helpful(caught.value, named)
        assert re.match(rf"{strategy.__name__}\b|update_device='smartssd' needs", str(caught.value))


@pytest.mark.parametrize(
    "settings",
    [
        {"tasklet_bytes": 1000},
        {"tasklet_bytes": 2.5e6},
        {"tasklet_bytes": 10**23},
        {"num_buffers": 1},
        {"num_buffers": 4097},
        {"compute_threads": 0},
        {"compute_threads": 1025},
        {"compute_threads": True},
        {"compute_threads": 1.5},
        {"io_engine": "spdk"},
        {"io_engine": "plain", "direct_io": "on"},
        {"durability": "forever"},
        {"direct_io": True},
        {"dram_cache_bytes": -1},
        {"dram_cache_bytes": 0.5},
        {"dram_cache_bytes": True},
        {"dram_cache_bytes": "all"},
        {"job": "a/b"},
        {"job": "lost+found"},
        {"job": ""},
        {"job": " "},
        {"job": "name "},
        {"job": "two\nlines"},
        {"job": "\0"},
        {"job": "\udc80"},
        {"keep": "yes"},
    ],
)
def test_transfer_settings_out_of_range_raise(settings: dict[str, Any]) -> None:
    """TransferConfig validates its settings at construction."""
    with pytest.raises(ConfigError) as caught:
        TransferConfig(**settings)
    assert_helpful(caught.value, next(iter(settings)))


def test_zero_settings_are_validated_before_anything_is_written(tmp_path: Path) -> None:
    """Our own error refuses a value that DeepSpeed does not take, and no folder is created."""
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s", zero={"reduce_bucket_size": -5}), tmp_path)
    assert_helpful(caught.value, "SmartInfinityStrategy", "reduce_bucket_size: Input should be greater than 0")
    assert not (tmp_path / "s").exists()


def test_a_root_folder_that_is_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs may go to a URL; optimizer state may not, and no folder with its name is created."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^SmartInfinityStrategy\(storage=None\).*'memory://run', which is a URL"):
        fit(LitTiny(Recipe()), SmartInfinityStrategy(), "memory://run")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_checkpoints_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that would go to a URL, or come from one, is refused; no folder with its name is created."""
    monkeypatch.chdir(tmp_path)
    made = partial(SmartInfinityStrategy, tmp_path / "s")
    keeper = pl.callbacks.ModelCheckpoint("memory://run")
    with pytest.raises(CheckpointError, match=r"'memory://run' is a URL.*ModelCheckpoint\(dirpath=...\)"):
        fit(LitTiny(Recipe()), made(), tmp_path, callbacks=[keeper], enable_checkpointing=True)
    assert not (tmp_path / "s").exists()
    with pytest.raises(CheckpointError, match=r"'memory://logs/checkpoints' is a URL"):
        fit(LitTiny(Recipe()), made(), "memory://logs", enable_checkpointing=True)  # type: ignore[arg-type]
    trainer = fit(LitTiny(Recipe()), made(), "memory://logs")  # type: ignore[arg-type]
    for path in ("memory://run/last.ckpt", Path("s3://bucket/last.ckpt")):
        with pytest.raises(CheckpointError, match="is a URL"):
            trainer.save_checkpoint(path)
    with pytest.raises(CheckpointNotFoundError, match="URLs are not read"):
        trainer.fit(LitTiny(Recipe()), ckpt_path="memory://run/last.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]


def test_a_bucket_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the setting, and no folder is created."""
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)  # one process on a CPU uses no buckets
    with pytest.raises(ConfigError) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s", zero={"reduce_bucket_size": 10**16}), tmp_path)
    assert_helpful(caught.value, "'reduce_bucket_size': 10000000000000000")
    assert not (tmp_path / "s").exists()


class Custom(torch.optim.AdamW):
    """A subclass, which may do anything in its step()."""


def _two(module: LitTiny) -> Any:
    half = list(module.parameters())
    return [torch.optim.AdamW(half[:3]), torch.optim.AdamW(half[3:])]


OPTIMIZERS: dict[str, tuple[Callable[[LitTiny], Any], str]] = {
    "NAdam": (lambda m: torch.optim.NAdam(m.parameters()), "NAdam"),
    "a subclass": (lambda m: Custom(m.parameters()), "Custom"),
    "amsgrad": (lambda m: torch.optim.AdamW(m.parameters(), amsgrad=True), "amsgrad"),
    "Rprop": (lambda m: torch.optim.Rprop(m.parameters()), "Rprop"),
    "two optimizers": (_two, "several optimizers"),
    "none": (lambda m: None, "LitTiny.configure_optimizers returned None"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unsupported_optimizers_are_refused(name: str, tmp_path: Path) -> None:
    """The message names the optimizer and lists the supported ones. Nothing is written."""
    configure, named = OPTIMIZERS[name]
    module = LitTiny(Recipe())
    module.configure_optimizers = lambda: configure(module)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedError) as caught:
        fit(module, SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, named)
    if name not in ("two optimizers", "amsgrad"):
        assert_helpful(caught.value, "AdamW", "Adam", "Adagrad", "SGD", "RMSprop")
    assert not (tmp_path / "s").exists()


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    """Embedding(sparse=True) is refused before training."""
    module = LitTiny(Recipe(tied=False))
    module.model.tokens = nn.Embedding(64, 32, sparse=True)
    with pytest.raises(UnsupportedError) as caught:
        fit(module, SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, "model.tokens", "sparse=False")
    assert not (tmp_path / "s").exists()


def test_a_model_with_nothing_to_train_is_refused(tmp_path: Path) -> None:
    """A model whose parameters are all frozen raises our own error instead of DeepSpeed's."""
    module = LitTiny(Recipe())
    optimizer = torch.optim.AdamW(module.parameters())
    module.configure_optimizers = lambda: optimizer  # type: ignore[method-assign]
    module.requires_grad_(False)
    with pytest.raises(UnsupportedError) as caught:
        fit(module, SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, "requires_grad")


class Manual(LitTiny):
    """A module with manual optimization that asks the optimizer for its state."""

    automatic_optimization = False

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.optimizers().state_dict()  # type: ignore[union-attr]


def test_close_removes_the_storage_of_a_fit_that_was_refused_within(tmp_path: Path) -> None:
    """optimizer.state_dict() raises, and close() removes the storage of the aborted fit."""
    strategy = SmartInfinityStrategy(tmp_path / "s")
    with pytest.raises(UnsupportedError) as caught:
        fit(Manual(Recipe()), strategy, tmp_path)
    assert_helpful(caught.value, "state_dict", "trainer.save_checkpoint")
    strategy.close()
    assert not list((tmp_path / "s").rglob("*.bin"))


@pytest.mark.parametrize("folder", ["file/below", "/proc/nowhere/storage"])
def test_a_folder_that_cannot_be_made_is_named(folder: str, tmp_path: Path) -> None:
    """StorageError names the path if a file is in the way or the file system allows no folders."""
    (tmp_path / "file").write_text("in the way")
    storage = Path(folder) if folder.startswith("/") else tmp_path / folder
    with pytest.raises(StorageError) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(storage), tmp_path)
    assert_helpful(caught.value, str(storage.name))


def test_a_memory_file_system_warns_or_refuses() -> None:
    """On tmpfs the strategy warns by default and raises with direct_io="on"."""
    folder = Path("/dev/shm") / f"smart-infinity-test-{os.getpid()}"
    try:
        strategy = SmartInfinityStrategy(folder)
        with pytest.warns(UserWarning, match=r"tmpfs"):
            fit(LitTiny(Recipe()), strategy, folder)
        strategy.close()
        with pytest.raises(StorageError) as caught:
            fit(LitTiny(Recipe()), SmartInfinityStrategy(folder, transfer=TransferConfig(direct_io="on")), folder)
        assert_helpful(caught.value, str(folder))
    finally:
        subprocess.run(["rm", "-rf", str(folder)], check=True, timeout=PROCESS_LIMIT)


def test_too_little_space_is_found_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has the bytes needed and the bytes free, and no state file is left."""
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        values = list(real(path))
        values[0] = values[1] = 4096  # f_bsize, f_frsize
        values[3] = values[4] = 75  # f_bfree, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "statvfs", nearly_full)
    with pytest.raises(StorageFullError) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, str(tmp_path / "s"), "0.29 MiB are free")
    needed = re.search(r"needs ([\d.]+) MiB", str(caught.value))
    assert needed is not None, caught.value
    numel = sum(parameter.numel() for parameter in LitTiny(Recipe()).parameters())
    both_places_bytes = 2 * 12 * numel
    assert both_places_bytes <= float(needed.group(1)) * 2**20 < 1.25 * both_places_bytes
    assert not list(tmp_path.rglob("*.bin"))


def test_two_jobs_on_one_folder_are_kept_apart(tmp_path: Path) -> None:
    """A job whose store another process has is refused with its pid; under another name it runs beside the other."""
    holder = subprocess.Popen(
        [sys.executable, "-m", "tests.training.holder", str(tmp_path / "s"), "default"],
        cwd=REPOSITORY,
        env=fresh_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None
        while "HOLDING" not in (line := holder.stdout.readline()):
            assert line, "the holder died"
        with pytest.raises(StorageLockedError) as caught:
            fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
        assert_helpful(caught.value, str(holder.pid))
        other = SmartInfinityStrategy(tmp_path / "s", transfer=TransferConfig(job="other"))
        assert fit(LitTiny(Recipe()), other, tmp_path).global_step == 1
        other.close()
    finally:
        holder.communicate("\n", timeout=LIMIT)
    assert not list((tmp_path / "s").rglob("*.bin"))


def test_two_fits_in_one_process_share_a_folder(tmp_path: Path) -> None:
    """The next fit on the same storage closes the store of the finished fit."""
    first = SmartInfinityStrategy(tmp_path / "s")
    fit(LitTiny(Recipe()), first, tmp_path)
    assert first.state_numel > 0
    second = SmartInfinityStrategy(tmp_path / "s")
    fit(LitTiny(Recipe()), second, tmp_path)
    assert second.traffic().steps == 1
    assert first.traffic().steps == 0, "the first store should be closed"
    second.close()
    assert not list((tmp_path / "s").rglob("*.bin"))


def test_keep_leaves_the_state_and_protects_it(tmp_path: Path) -> None:
    """keep=True leaves the files after close, and a later job refuses to overwrite them."""
    keep = SmartInfinityStrategy(tmp_path / "s", transfer=TransferConfig(keep=True))
    fit(LitTiny(Recipe()), keep, tmp_path)
    keep.close()
    assert list((tmp_path / "s").rglob("state.bin"))
    with pytest.raises(StorageError) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert_helpful(caught.value, "keep")
