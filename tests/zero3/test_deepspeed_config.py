"""Tests the DeepSpeed configuration that is made from the user's ``zero=``."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.zero3.setup.deepspeed_config import build_deepspeed_config


def section(zero: dict[str, Any] | None) -> dict[str, Any]:
    result: dict[str, Any] = build_deepspeed_config(zero)["zero_optimization"]
    return result


def test_users_keys_come_on_top_of_ours() -> None:
    """The user's mapping is copied: DeepSpeed writes into what it is given."""
    mine = {"offload_param": {"device": "cpu"}, "overlap_comm": True}
    made = section(mine)
    assert made == section(None) | mine
    assert made["stage"] == 3 and made["offload_optimizer"]["device"] == "cpu"
    assert made["offload_param"] is not mine["offload_param"]


def test_reuse_of_parameters() -> None:
    """DeepSpeed does not search the rest of the step for the next use of a parameter, unless the user says so."""
    assert section(None)["stage3_max_reuse_distance"] == 0
    assert section({"stage3_max_reuse_distance": 7})["stage3_max_reuse_distance"] == 7
    assert section({"max_reuse_distance": 7}).keys() >= {"max_reuse_distance"}


def test_parameters_on_storage() -> None:
    """No parameters stay in memory or gathered, unless the user says so."""
    made = section({"offload_param": {"device": "nvme"}})
    assert made["offload_param"]["max_in_cpu"] == 0 and made["stage3_max_reuse_distance"] == 0
    made = section({"offload_param": {"device": "nvme", "max_in_cpu": 7}, "max_reuse_distance": 9})
    assert made["offload_param"]["max_in_cpu"] == 7 and "stage3_max_reuse_distance" not in made


def test_values_that_cannot_be_copied() -> None:
    """The error names the setting; DeepSpeed would write into the user's own values."""
    with pytest.raises(ConfigError, match=r"^Mine\(zero=.*cannot be copied.*Pass plain values"):
        build_deepspeed_config({"leaf_module": threading.Lock()}, owner="Mine")


def test_refused_features_that_are_off() -> None:
    """A key that switches nothing on is accepted."""
    off = {"zenflow": None, "zero_quantized_weights": False, "zero_hpz_partition_size": 1}
    assert section(off) == section(None) | off
