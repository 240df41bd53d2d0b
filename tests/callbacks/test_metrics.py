"""Metrics of traffic, with expected values worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path

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
from tests.helpers.processes import run_module

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
    """Every counter is the difference of the two readings."""
    later = Traffic(steps=3, numel=400, shared_read_bytes=1000, shared_write_bytes=1200, wait_seconds=2.0)
    earlier = Traffic(steps=1, numel=100, shared_read_bytes=800, shared_write_bytes=1200, wait_seconds=0.5)
    assert traffic_between(earlier, later) == Traffic(steps=2, numel=300, shared_read_bytes=200, wait_seconds=1.5)


def test_between_two_stores() -> None:
    """Counters that restarted count only the traffic since then."""
    assert traffic_between(ONE, Traffic(shared_write_bytes=5)) == Traffic(shared_write_bytes=5)


@pytest.mark.parametrize(
    ("channel", "direction", "expected"),
    [
        ("all", "both", 2100 + 6000),
        ("shared", "both", 2000 + 6000),
        ("shared", "read", 800 + 2400),
        ("internal", "both", 100),
        ("internal", "write", 60),
        ("all", "read", 840 + 2400),
        ("cached", "both", 7 + 11),
        ("cached", "write", 11),
    ],
)
def test_bytes_add_up_over_updates(channel: str, direction: str, expected: int) -> None:
    """The metric adds the bytes of the chosen channel and direction in every phase."""
    metric = StorageBytes(channel, direction)
    metric.update(ONE)
    metric.update(TWO, phase=Phase.OTHER)
    assert metric.compute().item() == expected


def test_storage_folders() -> None:
    """Bytes of a folder add up over ranks. Its bandwidth uses the longest busy time of a rank."""
    first, second = (StorageCounters(num_folders=2) for _ in range(2))
    slow = FolderTraffic(read_bytes=100, write_bytes=200, busy_seconds=3.0)
    fast = FolderTraffic(read_bytes=1000, write_bytes=500, busy_seconds=1.0)
    first.update(Traffic(steps=1, folders=(slow, fast)))
    first.update(Traffic(folders=(slow, fast)), phase=Phase.OTHER)
    second.update(Traffic(steps=1, folders=(slow, slow)))
    second.update(Traffic(numel=1))  # from storage that is closed
    table = StorageCounters.table(torch.cat([first.compute(), second.compute()]), Phase.STEP)
    assert table.folder_bytes().tolist() == [600, 1800]
    assert table.folder_bandwidth().tolist() == [200.0, 600.0]
    assert table.column("steps").tolist() == [1, 1]


def test_terabytes_stay_exact() -> None:
    """The counter is exact beyond the whole numbers of float32 and float64."""
    metric = StorageBytes()
    metric.update(Traffic(shared_write_bytes=2**53))
    metric.update(Traffic(shared_write_bytes=1))
    assert metric.compute().item() == 2**53 + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_a_module_of_16_bits(dtype: torch.dtype) -> None:
    """Converting the module around a metric does not change its counters."""
    module = nn.ModuleDict({"metric": StorageWait()})
    module["metric"].update(Traffic(wait_seconds=1.000000001))
    module.to(dtype)
    assert module["metric"].compute().item() == 1.000000001


def test_bandwidth_per_wall_and_per_waited_second() -> None:
    """Bandwidth is the bytes of steps per wall time or per waited time. Other phases do not count."""
    for per, seconds in (("wall", 4.0 + 6.0), ("wait", 0.5 + 1.5)):
        metric = StorageBandwidth("shared", "write", per)
        metric.update(ONE, seconds=4.0)
        metric.update(TWO, seconds=6.0)
        metric.update(TWO, seconds=100.0, phase=Phase.OTHER)
        assert metric.compute().item() == pytest.approx(4800 / seconds)


def test_bytes_per_parameter() -> None:
    """The metric is bytes per updated element."""
    metric = BytesPerParameter("shared")
    metric.update(ONE)
    metric.update(TWO)
    assert metric.compute().item() == pytest.approx(8000 / 400)


def test_nothing_updated() -> None:
    """Without elements or time the value is NaN."""
    for metric in (BytesPerParameter(), StorageBandwidth()):
        metric.update(Traffic())
        assert math.isnan(metric.compute().item())


def test_forward_returns_the_interval_alone() -> None:
    """Calling a metric returns the value of this interval and adds it to the total."""
    metric = StorageBytes()
    metric(ONE)
    assert metric(TWO).item() == 6000
    assert metric.compute().item() == 8100
    metric.reset()
    metric.update(ONE)
    assert metric.compute().item() == 2100


def test_table_of_one_rank() -> None:
    """The table holds all counters by name and phase at the time of computing."""
    metric = StorageCounters()
    metric.update(ONE, seconds=1.5)
    metric.update(TWO, phase=Phase.OTHER)
    computed = metric.compute()
    metric.update(TWO)
    in_steps, overall = metric.table(computed, Phase.STEP), metric.table(computed)
    assert in_steps.column("shared_read_bytes").tolist() == [800]
    assert in_steps.seconds("wall_seconds").tolist() == [1.5]
    assert overall.column("shared_read_bytes").tolist() == [3200]
    assert (overall - in_steps).column("numel").tolist() == [300]
    assert (in_steps + in_steps).seconds("wait_seconds").tolist() == [1.0]


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


def test_two_ranks(tmp_path: Path) -> None:
    """Ranks agree: bytes add up, the slowest rank's time counts, and one collective is enough."""
    done = run_module("tests.callbacks.metrics_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1)]
    expected = {
        "bytes": 2100 + 6000,
        "bandwidth": 8000 / 3.0,
        "wait max": 1.5,
        "wait mean": 1.0,
        "per parameter": 8100 / 400,
    }
    for result in results:
        assert result["values"] == pytest.approx(expected)
        assert result["again"] == result["values"]
        assert result["gathers"] == 1
        assert result["more"] == 8100 + 2 * 2100
