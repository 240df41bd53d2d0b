"""Bad input raises one of our own errors with a remedy and leaves nothing behind."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.moe.experts import Experts
from torch import nn

from lightning_smartinfinity import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    SmartInfinityError,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    StorageError,
    StorageLockedError,
    TransferConfig,
    UnsupportedError,
)
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.helpers import trainers
from tests.helpers.assertions import assert_helpful, refused
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.streamed_state import DEFAULTS


def fit(module: pl.LightningModule, strategy: SmartInfinityStrategy, root: Path, **trainer: Any) -> pl.Trainer:
    """Fit for one step in fp32."""
    return trainers.fit(module, root, strategy, **{"precision": "32-true", "max_steps": 1, **trainer})


def free_bytes(count: int) -> Any:
    """Return a patch that makes every file system report ``count`` free bytes."""
    real = os.statvfs

    def statvfs(path: Any) -> os.statvfs_result:
        values = list(real(path))
        values[0] = values[1] = 4096  # f_bsize, f_frsize
        values[3] = values[4] = count // 4096  # f_bfree, f_bavail
        return os.statvfs_result(values)

    return mock.patch.object(os, "statvfs", statvfs)


STORED = {"offload_param": {"device": "nvme"}}
BUDGET = {"transfer": {"parameter_bytes": "1MB"}}
FEATURES = ("hpZ", "MiCS", "ZenFlow", "SuperOffload", "quantized", "elastic", "load_from_fp32_weights")
PASSED_ON = {"transfer": "TransferConfig|zero", "plan": "PlanConfig|SmartInfinity(?:Fabric)?Strategy"}


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
        ({"zero": {"super_offload": True}}, "SuperOffload"),
        ({"zero": {"zero_quantized_gradients": True}}, "quantized gradients"),
        ({"zero": {"zero_quantized_nontrainable_weights": True}}, "quantized weights"),
        ({"zero": {"elastic_checkpoint": True}}, "elastic"),
        ({"zero": {"load_from_fp32_weights": False}}, "load_from_fp32_weights"),
        # Old names.
        ({"zero": {"cpu_offload": True}}, "cpu_offload"),
        ({"zero": {"cpu_offload_param": True}}, "offload_param"),
        ({"zero": {"cpu_offload_use_pin_memory": True}}, "pin_memory"),
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
        # Misspelt, or refused whatever the value.
        ({"zero": {"zero_hpz_partitions": 2}}, "hpZ"),
        ({"zero": {"mics_shard_size": -1}}, "MiCS"),
        # What follows from a budget is not set beside it, and its parameters have to be on storage.
        ({**BUDGET, "zero": None}, "needs parameters on storage"),
        ({**BUDGET, "zero": {"offload_param": {"device": "cpu"}}}, "needs parameters on storage"),
        ({**BUDGET, "zero": {**STORED, "stage3_max_live_parameters": 5}}, "live_parameters': ...} follows from"),
        ({**BUDGET, "zero": {**STORED, "prefetch_bucket_size": 5}}, "'prefetch_bucket_size': ...} follows from"),
        (
            {**BUDGET, "zero": {"offload_param": {"device": "nvme", "buffer_count": 5}}},
            "'buffer_count': ...}} follows from",
        ),
        ({"plan": "fast"}, "plan='fast'"),
        ({"plan": {"batchsize": 2}}, "batchsize"),
        ({"plan": {"batch": 0}}, "batch=0"),
        ({"plan": {"state_formats": ["fp8"]}}, "state_formats"),
        ({"plan": {"host_memory": "much"}}, "host_memory"),
        ({"plan": {"model": ""}}, "model=''"),
        ({"plan": {"optimizer": "Lion"}}, "optimizer='Lion'"),
    ],
)
def test_unknown_or_contradictory_settings_raise_in_the_constructor(settings: dict[str, Any], named: str) -> None:
    """The constructor raises an error that begins with the class that was called, and names the value.

    The errors of what it passes on, of a budget and of a plan, begin with what they are about.
    That of a feature that does not work here is another one than that of a wrong value.
    """
    for strategy in (SmartInfinityStrategy, SmartInfinityFabricStrategy):
        with pytest.raises(UnsupportedError if named.startswith(FEATURES) else ConfigError) as caught:
            strategy(**settings)
        assert_helpful(caught.value, named)
        owner = PASSED_ON.get(next(iter(settings)), strategy.__name__)
        assert re.match(rf"(?:{owner})\b|update_device='smartssd' needs", str(caught.value))


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
        {"accumulate_in": "bf16"},
    ],
)
def test_transfer_settings_out_of_range_raise(settings: dict[str, Any]) -> None:
    """TransferConfig validates its settings at construction."""
    with refused(ConfigError, next(iter(settings))):
        TransferConfig(**settings)


def test_checkpoints_at_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that would go to a URL, or come from one, is refused; no folder with its name is created.

    Logs may go to a URL; optimizer state may not.
    """
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^SmartInfinityStrategy\(storage=None\).*'memory://run', which is a URL"):
        fit(LitTiny(Recipe()), SmartInfinityStrategy(), "memory://run")  # type: ignore[arg-type]
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


class Custom(torch.optim.AdamW):
    """A subclass, which may do anything in its step()."""


def optimized(configure: Callable[[list[Any]], Any], **recipe: Any) -> LitTiny:
    """Return a module with a function that makes its optimizers from its parameters."""
    module = LitTiny(Recipe(**recipe))
    params = list(module.parameters())
    module.configure_optimizers = lambda: configure(params)  # type: ignore[method-assign]
    return module


def sparse() -> LitTiny:
    module = LitTiny(Recipe(tied=False))
    module.model.tokens = nn.Embedding(64, 32, sparse=True)
    return module


def complex_valued() -> LitTiny:
    module = LitTiny(Recipe())
    module.rotations = nn.Parameter(torch.ones(4, dtype=torch.complex64))  # casting would drop the imaginary parts
    return module


def by_two_optimizers() -> LitTiny:
    """Return a module that two optimizers train by hand, which Lightning itself allows."""
    module = optimized(lambda params: [torch.optim.AdamW(params[:3]), torch.optim.AdamW(params[3:])])
    module.automatic_optimization = False
    return module


def with_experts(part: str) -> LitTiny:
    module = LitTiny(Recipe(tied=False))
    if part == "layer":
        module.model.side = Experts(nn.Linear(32, 32))
    else:
        module.model.side.weight.allreduce = False  # type: ignore[union-attr]
    params = list(module.parameters())
    module.configure_optimizers = lambda: torch.optim.AdamW(params)  # type: ignore[method-assign]
    return module


def with_own_step(params: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return optimizer


def with_state_hook(params: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    return optimizer


def with_foreign_state(params: list[Any]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(params)
    optimizer.state[params[0]]["max_exp_avg_sq"] = torch.zeros_like(params[0])
    return optimizer


def plain() -> LitTiny:
    return LitTiny(Recipe())


SUPPORTED = [name for rule in RULES for name in rule.optimizers]
ADAMW = torch.optim.AdamW
REFUSED: dict[str, tuple[Callable[[], LitTiny], dict[str, Any], type[SmartInfinityError], tuple[str, ...]]] = {
    "NAdam": (lambda: optimized(torch.optim.NAdam), {}, UnsupportedError, ("NAdam", *SUPPORTED)),
    "a subclass": (lambda: optimized(Custom), {}, UnsupportedError, ("Custom", *SUPPORTED)),
    "amsgrad": (lambda: optimized(partial(ADAMW, amsgrad=True)), {}, UnsupportedError, ("amsgrad",)),
    "two optimizers": (
        lambda: optimized(lambda params: [ADAMW(params[:3]), ADAMW(params[3:])]),
        {},
        UnsupportedError,
        ("several optimizers",),
    ),
    "a step of its own": (lambda: optimized(with_own_step), {}, UnsupportedError, ("AdamW.step was replaced",)),
    "a hook of state": (
        lambda: optimized(with_state_hook),
        {},
        UnsupportedError,
        ("register_load_state_dict_pre_hook",),
    ),
    "state of another": (lambda: optimized(with_foreign_state), {}, UnsupportedError, ("'max_exp_avg_sq'",)),
    "two optimizers by hand": (by_two_optimizers, {}, UnsupportedError, ("2 optimizers", "parameter groups")),
    "no optimizer": (
        lambda: optimized(lambda params: None),
        {},
        UnsupportedError,
        ("LitTiny.configure_optimizers returned None", *SUPPORTED),
    ),
    "an optimizer without moments to round": (
        lambda: optimized(torch.optim.Adagrad),
        {"state_format": "bf16"},
        UnsupportedError,
        ("'bf16'", "Adagrad", "'fp32'", "AdamW"),
    ),
    **{
        f"remainders in {precision}": (
            partial(LitTiny, Recipe(precision=precision)),
            {"state_format": "int8_remainder"},
            ConfigError,
            ("'int8_remainder'", "bf16-mixed", "'int8'"),
        )
        for precision in ("32-true", "16-mixed")
    },
    "a parameter given twice": (
        lambda: optimized(lambda params: ADAMW([*params, params[0]])),
        {},
        UnsupportedError,
        ("'model.tokens.weight'", "2 times"),
    ),
    "another's parameter": (
        lambda: optimized(lambda params: ADAMW([*params, nn.Parameter(torch.ones(3, 5))])),
        {},
        UnsupportedError,
        ("group 0", "(3, 5)", "LitTiny"),
    ),
    "expert's parameter": (lambda: with_experts("parameter"), {}, UnsupportedError, ("model.side.weight",)),
    "expert layer": (lambda: with_experts("layer"), {}, UnsupportedError, ("model.side", "deepspeed.moe")),
    "sparse gradients": (sparse, {}, UnsupportedError, ("model.tokens", "sparse=False")),
    "complex parameters": (complex_valued, {}, UnsupportedError, ("rotations",)),
    "nothing to train": (lambda: optimized(ADAMW).requires_grad_(False), {}, UnsupportedError, ("requires_grad",)),
    "a value that DeepSpeed does not take": (
        plain,
        {"zero": {"reduce_bucket_size": -5}},
        ConfigError,
        ("SmartInfinityStrategy", "reduce_bucket_size: Input should be greater than 0"),
    ),
    "a bucket larger than memory": (
        plain,
        {"zero": {"reduce_bucket_size": 10**16}},
        ConfigError,
        ("'reduce_bucket_size': 10000000000000000",),
    ),
    "no buffers for parameters on storage": (
        plain,
        {"zero": {"offload_param": {"device": "nvme", "buffer_count": 0}}},
        ConfigError,
        ("buffer_count", "at least 1"),
    ),
    "below a file": (plain, {"storage": "file/below"}, StorageError, ("below",)),
    "where no folders can be": (plain, {"storage": "/proc/nowhere/storage"}, StorageError, ("storage",)),
}


@pytest.mark.seam("refusing several optimizers", "lightning.pytorch.core.optimizer._init_optimizers_and_lr_schedulers.")
@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_before_anything_is_written(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own error names the value and the remedy, and no folder is created."""
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)  # one process on a CPU uses no buckets
    (tmp_path / "file").write_text("in the way")
    make, settings, error, named = REFUSED[name]
    module = make()
    strategy = SmartInfinityStrategy(**{**settings, "storage": tmp_path / settings.get("storage", "s")})
    with refused(error, *named):
        fit(module, strategy, tmp_path, precision=module.recipe.precision)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_memory_file_system_warns_or_refuses(caplog: pytest.LogCaptureFixture) -> None:
    """On tmpfs the strategy warns by default and raises with direct_io="on". State is not in memory a second time."""
    with TemporaryDirectory(dir="/dev/shm") as name, caplog.at_level(logging.INFO):
        folder = Path(name)
        strategy = SmartInfinityStrategy(folder, transfer={**DEFAULTS})
        with pytest.warns(UserWarning, match=r"tmpfs"):
            fit(LitTiny(Recipe()), strategy, folder)
        assert f"the limit is 0.00 GiB: the files in {name!r} are in memory already" in caplog.text
        strategy.close()
        with refused(StorageError, name):
            fit(LitTiny(Recipe()), SmartInfinityStrategy(folder, transfer=TransferConfig(direct_io="on")), folder)


def test_two_jobs_on_one_folder_are_kept_apart(tmp_path: Path) -> None:
    """A job that is held is refused with the holder's pid, under another name one runs beside it; a kept one stays."""
    held = RankFolder(tmp_path / "s/default/rank-00000", create=True)
    with refused(StorageLockedError, str(os.getpid())):
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    kept, again = (SmartInfinityStrategy(tmp_path / "s", transfer={"job": "other", "keep": True}) for _ in range(2))
    fit(LitTiny(Recipe()), kept, tmp_path)
    kept.close()
    with refused(StorageError, "keep"):
        fit(LitTiny(Recipe()), again, tmp_path)
    held.close(remove=True)
    assert [path.parts[-3] for path in tmp_path.rglob("state.bin")] == ["other"]
