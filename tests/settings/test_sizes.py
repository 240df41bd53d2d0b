"""Sizes can be written as people write them, wherever a setting is in bytes."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from lightning_smartinfinity import ConfigError, TransferConfig
from lightning_smartinfinity.cli.plan_options import add_options
from lightning_smartinfinity.settings.rules import in_bytes, num_bytes

SIZES = {
    "512": 512,
    "8GB": 8_000_000_000,
    "8gb": 8_000_000_000,
    "8 G": 8_000_000_000,
    "8GiB": 8_589_934_592,
    " 8 gi ": 8_589_934_592,
    "1.5kB": 1_500,
    "1.5KiB": 1_536,
    "0.1MB": 100_000,
    "2TB": 2_000_000_000_000,
    "2TiB": 2_199_023_255_552,
}
NO_SIZES: tuple[Any, ...] = ("", "GB", "8XB", "-8GB", "+8GB", "8e9", "8,5GB", "nan", "inf", "8GB 1", "٨GB", "9" * 21)
NO_SIZES += (None, True, 8.0, [8], b"8GB")


@pytest.mark.parametrize("text", SIZES)
def test_a_size_with_its_unit(text: str) -> None:
    """Units are powers of 1000, and with an i powers of 1024. The setting is kept as bytes."""
    assert in_bytes(text) == SIZES[text]
    assert TransferConfig(dram_cache_bytes=text).dram_cache_bytes == SIZES[text]


@pytest.mark.parametrize("value", NO_SIZES)
def test_what_is_no_size(value: object) -> None:
    """The rule refuses it, and the remedy shows how a size is written."""
    assert in_bytes(value) is None
    assert not num_bytes(0).holds(value)
    if value is not None:  # which keeps the default of tasklet_bytes
        with pytest.raises(ConfigError, match=r"TransferConfig\(tasklet_bytes=.* is no size .*'64MB' .*'64MiB'"):
            TransferConfig(tasklet_bytes=value)  # type: ignore[arg-type]


def test_both_ends_of_the_range_are_allowed() -> None:
    """A size has a range, however it is written."""
    rule = num_bytes(1000, 2000)
    assert [value for value in (999, 1000, "1kB", "1KiB", "2kB", 2000, "2KiB", "1TB") if rule.holds(value)] == [
        1000,
        "1kB",
        "1KiB",
        "2kB",
        2000,
    ]
    assert type(rule.kept(np.int64(1000))) is int


@pytest.mark.parametrize(("size", "expected"), [("4MB", 4_000_000), ("4MiB", 4_194_304), (None, None)])
def test_a_tasklet_of_so_many_megabytes(size: str | None, expected: int | None) -> None:
    """Any size from 64 KiB on is taken, whether or not it is a multiple of something."""
    config = TransferConfig(tasklet_bytes=size)
    assert (config.tasklet_bytes, config.buffer_bytes) == (expected, expected)


def test_a_tasklet_that_is_too_small() -> None:
    """The error names the least size."""
    with pytest.raises(ConfigError, match=r"tasklet_bytes='4kB'.* from 65536 to"):
        TransferConfig(tasklet_bytes="4kB")


def test_sizes_of_a_machine_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """``smart-infinity plan`` reads sizes by the same rule. A number that lacks its unit is refused."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = parser.parse_args(["7B", "--host-memory", "24GiB", "--disk", "2T", "--gpu-memory", "24gb"])
    assert (options.host_memory, options.disk, options.gpu_memory) == (24 * 2**30, 2 * 10**12, 24 * 10**9)
    assert parser.parse_args(["7B", "--gpu-memory", "none"]).gpu_memory == "none"
    for wrong in (["--host-memory", "24"], ["--gpu-memory", "24"], ["--disk", "all"]):
        with pytest.raises(SystemExit):
            parser.parse_args(["7B", *wrong])
        assert "Pass a size with its unit" in capsys.readouterr().err
