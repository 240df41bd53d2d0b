"""Metrics of traffic, with expected values worked out by hand."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from lightning_smartinfinity.devices.base import FolderTraffic, Traffic
from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.integrations.trainer.metrics import (
    BytesPerParameter,
    Phase,
    StorageBandwidth,
    StorageBytes,
    StorageCounters,
    StorageWait,
    traffic_between,
)

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
    """Every counter is the difference of the two readings; counters that restarted count since then."""
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

    Torchmetrics stacks the states of ranks; tests/callbacks/test_with_strategy.py has two of them.
    """
    alone, first, second = (copy.deepcopy(metric) for _ in range(3))
    for one, other in ((alone, alone), (first, second)):
        one.update(ONE, seconds=2.0)
        other.update(TWO, seconds=3.0)
        one.update(TWO, seconds=100.0, phase=Phase.OTHER)
    first.counters = torch.stack([first.counters, second.counters])
    assert alone.compute().item() == pytest.approx(on_one)
    assert first.compute().item() == pytest.approx(on_two)


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
    assert table.folder_bytes().tolist() == [600, 1800]
    assert table.folder_bandwidth().tolist() == [200.0, 600.0]
    assert table.column("steps").tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_counters_stay_exact(dtype: torch.dtype) -> None:
    """They go beyond the whole numbers of float64, also in a module that is converted to 16 bit."""
    module = nn.ModuleDict({"bytes": StorageBytes(), "wait": StorageWait()})
    for traffic in (Traffic(shared_write_bytes=2**53, wait_seconds=1.000000001), Traffic(shared_write_bytes=1)):
        for metric in module.values():
            metric.update(traffic)
    module.to(dtype)
    assert module["bytes"].compute().item() == 2**53 + 1
    assert module["wait"].compute().item() == 1.000000001


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
    with pytest.raises(ConfigError, match=r"Use one of: ") as caught:
        build()  # type: ignore[operator]
    assert named in str(caught.value)
