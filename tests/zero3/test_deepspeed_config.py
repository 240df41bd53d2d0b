"""Tests the DeepSpeed configuration that is made from the user's ``zero=``, and the limit of open files."""

from __future__ import annotations

import resource
import threading
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.zero3 import require_descriptors
from lightning_smartinfinity.zero3.setup.deepspeed_config import build_deepspeed_config
from tests.helpers.models import LitTiny, Recipe
from tests.training.test_bad_input import fit

ON_STORAGE = {"device": "nvme"}
AS_BUILT = {"device": "nvme", "nvme_path": "unused"}


@pytest.mark.parametrize(
    ("zero", "made"),
    [
        (None, {"stage": 3, "stage3_max_reuse_distance": 0}),
        ({"overlap_comm": False}, {"overlap_comm": False}),
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
    assert {name: section[name] for name in made} == made and section["offload_optimizer"]["device"] == "cpu"
    assert ("max_reuse_distance" in section) + ("stage3_max_reuse_distance" in section) == 1


def test_values_are_copied() -> None:
    """DeepSpeed writes into what it is given. The error of a value that cannot be copied names the setting."""
    mine = {"offload_param": {"device": "cpu"}}
    assert build_deepspeed_config(mine)["zero_optimization"]["offload_param"] is not mine["offload_param"]
    with pytest.raises(ConfigError, match=r"^Mine\(zero=.*cannot be copied.*Pass plain values"):
        build_deepspeed_config({"leaf_module": threading.Lock()}, owner="Mine")


# ---- wrong keys in ``zero`` are answered when they are typed, in one hop: with a key that is taken, or what to write


STATE = "optimizer state is on storage. Leave it out: storage=... names the folders"
ON_CPU = "Write zero={'offload_param': {'device': 'cpu'}}"
BESIDE = "belongs outside of this section in DeepSpeed's configuration. Leave it out"


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        ({"stage": 2}, "training is always in ZeRO stage 3. Leave it out"),
        ({"stages": 3}, "'stage' cannot be set, because training is always in ZeRO stage 3. Leave it out"),
        ({"zero_stage": 3}, "'stage' cannot be set, because training is always in ZeRO stage 3. Leave it out"),
        ({"offload_optimizer": {"device": "nvme"}}, STATE),
        ({"offload_optim": {"device": "nvme"}}, STATE),
        ({"cpu_offload": True}, STATE),
        ({"optimizer": {"type": "AdamW"}}, "its state is in the folders of storage=..."),
        ({"cpu_offload_param": True}, ON_CPU),
        ({"cpu_offload_params": True}, ON_CPU),
        ({"zero_optimization": {"stage": 3, "overlap_comm": True}}, "inside of it: zero={'overlap_comm': True}."),
        ({"zero_optimization": 3}, "inside of it as zero={...}."),
        ({"bf16": {"enabled": True}}, BESIDE),
        ({"gradient_clip": 1.0}, BESIDE),
        ({"reduce_bucketsize": 7}, "Did you mean 'reduce_bucket_size'?"),
        ({"offload_params": {"device": "cpu"}}, "Did you mean 'offload_param'?"),
        ({"nvme_path": "/nvme"}, "Did you mean zero={'offload_param': {'nvme_path': ...}}?"),
        ({"offload_param": {"devise": "nvme"}}, "offload_param has no key 'devise'. Did you mean 'device'?"),
        ({"offload_param": {"buffers": 3}}, "Its keys are buffer_count, buffer_size, device"),
        ({"offload_param": "cpu"}, "offload_param is no dict. Pass a dict with some of buffer_count"),
        ({"leaf_module": 1}, "leaf_module is no dict. Pass a dict with some of classes, name_suffixes, names."),
        ({"leaf_module": {"class": "Block"}}, "Did you mean 'classes'?"),
        ({"pizza": 1}, "no key of DeepSpeed's zero_optimization section. Use the keys"),
        ({3: True}, "has a key that is no str"),
    ],
)
def test_a_wrong_key(zero: dict[Any, Any], words: str) -> None:
    """The error begins with the class that was called and what it was given, and says what to write."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityStrategy(zero=zero)
    assert str(caught.value).startswith(f"SmartInfinityStrategy(zero={zero!r})") and words in str(caught.value)


# ---- the limit of open files is checked before a training is set up


INFINITE = resource.RLIM_INFINITY


def limits(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int) -> list[tuple[int, int]]:
    """Stand for the process's limit of open files; return a list of which the last one is in force."""
    in_force = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: in_force[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: in_force.append(limits))
    return in_force


def test_a_limit_that_is_too_low_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ulimit -n 24 a fit raises our error, which names the limit, instead of gloo's."""
    limits(monkeypatch, 24, 24)
    with pytest.raises(
        StorageError, match=r"may open 24 files .* with 1 process on this machine and 1 storage folder needs"
    ) as caught:
        fit(LitTiny(Recipe()), SmartInfinityStrategy(tmp_path / "s"), tmp_path)
    assert "ulimit -n 1024" in caught.value.remedy and not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ((24, 4096), (4096, 4096)),
        ((24, INFINITE), (88, INFINITE)),
        ((88, 88), (88, 88)),
        ((INFINITE, INFINITE), (INFINITE, INFINITE)),
    ],
)
def test_a_limit_that_may_be_raised_is_raised(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], then: tuple[int, int]
) -> None:
    """The soft limit is raised as far as it may be if it is too low, and left alone otherwise."""
    in_force = limits(monkeypatch, *before)
    require_descriptors(num_processes=1, num_folders=2)
    assert in_force[-1] == then


def test_processes_and_folders_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """More processes on the machine, or more folders, need a higher limit."""
    limits(monkeypatch, 88, 88)
    for further in ({"num_processes": 2, "num_folders": 2}, {"num_processes": 1, "num_folders": 3}):
        with pytest.raises(StorageError, match=r"[23] (processes|storage folders).* ulimit -n"):
            require_descriptors(**further)
