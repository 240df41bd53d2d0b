"""dram_cache_bytes in training changes no bit, and the strategy reports the memory of the cache."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.common.machine import machine_identity
from lightning_smartinfinity.pipeline.layout.free_memory import MemoryLimit, MemoryReport
from lightning_smartinfinity.zero3.setup import open_storage as storage
from tests.training.test_overlap import BF16, SMALL_RING, assert_same, result
from tests.training.worker import Run, train

RECIPE = dataclasses.replace(BF16, groups=True, validate=True, accumulate=2, clip=0.3, max_steps=3)
BUCKET = {"reduce_bucket_size": 4000}  # gradients leave during backward


def run_of(root: Path, cache: int | str, **settings: Any) -> Run:
    options = {"overlap": settings.pop("overlap", "none"), "zero": {**BUCKET, **settings.pop("zero", {})}}
    transfer = {**SMALL_RING, "dram_cache_bytes": cache, "durability": settings.pop("durability", "step")}
    return Run(out=str(root), recipe=settings.pop("recipe", RECIPE), transfer=transfer, options=options, **settings)


def memory_of(available: int) -> Any:
    """Return a fake measurement of a machine with ``available`` free bytes."""

    def measure(*, reserved: int) -> MemoryReport:
        return MemoryReport(machine=machine_identity(), limits={"machine": MemoryLimit(0, available)}, reserved=0)

    return measure


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return result(run_of(tmp_path_factory.mktemp("straight"), 0))


@pytest.mark.parametrize(
    "settings",
    [
        {"cache": 100_000, "overlap": "backward", "delays": 1},
        pytest.param(
            {"cache": 100_000, "overlap": "forward", "durability": "none", "delays": 2}, marks=pytest.mark.long
        ),
        {"cache": 1 << 30, "durability": "none", "save_at": (2,)},
        {"cache": 100_000, "zero": {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}},
    ],
    ids=["backward", "forward-none", "none-all", "nvme"],
)
def test_same_bits(tmp_path: Path, settings: dict[str, Any], straight: Any) -> None:
    """A cache changes no bit with any overlap or durability, nor after a resume from a checkpoint of cached state."""
    assert_same(result(run_of(tmp_path / "cached", **settings)), straight)
    if "save_at" in settings:
        resume = str(tmp_path / "cached" / "step-2.ckpt")
        _, masters = result(run_of(tmp_path / "resumed", settings["cache"], durability="none", resume=resume))
        assert all(torch.equal(master, straight[1][name]) for name, master in masters.items())


@pytest.mark.parametrize("durability", ["step", "none"])
def test_what_is_free_becomes_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str) -> None:
    """With "auto" the cache holds as many whole tasklets as fit into free memory, and the strategy reports it."""
    monkeypatch.setattr(storage, "measure_memory", memory_of(100_000))
    _, trainer, _ = train(run_of(tmp_path, "auto", durability=durability, recipe=BF16))
    strategy: Any = trainer.strategy
    cached, traffic = strategy.host_bytes["dram_cache"], strategy.traffic()
    assert 100_000 - SMALL_RING["tasklet_bytes"] < cached <= 100_000
    assert traffic.cached_read_bytes > 0
    assert (traffic.cached_write_bytes > 0) == (durability == "none")
    layout = strategy.optimizers[0].partition.layout
    extents, count = layout.extents, layout.num_resident
    assert sum(extent.nbytes for extent in extents.extents[:count]) == cached
    num_places = extents.num_tasklets - count if durability == "none" else 2 * extents.num_tasklets
    assert strategy.state_bytes == num_places * extents.place_bytes
    strategy.close()
