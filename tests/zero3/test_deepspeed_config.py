"""Tests the DeepSpeed configuration that is made from the user's ``zero=``."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.zero3.setup.deepspeed_config import build_deepspeed_config

ON_STORAGE = {"device": "nvme"}
AS_BUILT = {"device": "nvme", "nvme_path": "unused"}


@pytest.mark.parametrize(
    ("zero", "made"),
    [
        (None, {"stage": 3, "stage3_max_reuse_distance": 0}),
        ({"overlap_comm": True}, {"overlap_comm": True}),
        ({"stage3_max_reuse_distance": 7}, {"stage3_max_reuse_distance": 7}),
        ({"offload_param": ON_STORAGE}, {"offload_param": {**AS_BUILT, "max_in_cpu": 0}}),
        (
            {"offload_param": {**ON_STORAGE, "max_in_cpu": 7}, "max_reuse_distance": 9},
            {"offload_param": {**AS_BUILT, "max_in_cpu": 7}, "max_reuse_distance": 9},
        ),
    ],
)
def test_users_keys_come_on_top_of_ours(zero: dict[str, Any] | None, made: dict[str, Any]) -> None:
    """No parameter on storage stays in memory, and DeepSpeed searches for no next use, unless the user says so."""
    section: dict[str, Any] = build_deepspeed_config(zero)["zero_optimization"]
    assert {name: section[name] for name in made} == made
    assert section["offload_optimizer"]["device"] == "cpu"
    assert ("max_reuse_distance" in section) + ("stage3_max_reuse_distance" in section) == 1


def test_values_are_copied() -> None:
    """DeepSpeed writes into what it is given. The error of a value that cannot be copied names the setting."""
    mine = {"offload_param": {"device": "cpu"}}
    assert build_deepspeed_config(mine)["zero_optimization"]["offload_param"] is not mine["offload_param"]
    with pytest.raises(ConfigError, match=r"^Mine\(zero=.*cannot be copied.*Pass plain values"):
        build_deepspeed_config({"leaf_module": threading.Lock()}, owner="Mine")
