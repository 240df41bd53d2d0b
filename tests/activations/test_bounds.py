"""Budget, pool and storage hold no more than they may, and what has no room stays in memory."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload, ConfigError, StorageFullError
from lightning_smartinfinity.activations import OffloadedActivations, pool
from lightning_smartinfinity.settings import activation_offload
from tests.activations.chains import (
    BLOCK,
    activations,
    assert_nothing_is_left,
    assert_right,
    assert_step_is_right,
    chain,
    expected,
    saved,
)
from tests.activations.models import everything, finish_writes, opened
from tests.helpers.assertions import refused
from tests.helpers.native_testing import Hold
from tests.helpers.waiting import await_that

__all__ = ["activations"]


@pytest.mark.parametrize("retains", [False, True])
def test_backward_stays_below_the_budget(tmp_path: Path, retains: bool) -> None:
    """Where much stays in memory, less is read back at once than the pool has room for, and nothing warns."""
    settings = everything(keep=8 * BLOCK, host_bytes=5 * BLOCK, budget_bytes=10 * BLOCK)
    with opened(tmp_path, settings) as activations, warnings.catch_warnings(action="error"):
        for _ in range(2):
            x, held = torch.randn(BLOCK // 4, requires_grad=True), list[int]()
            with activations.forward(x):
                y = x
                for _ in range(30):
                    y = y.sin()
                    y.register_hook(lambda _, held=held: held.append(activations.held_bytes))
            if retains:
                finish_writes(activations)  # what is forwarded would stay in memory until the graph goes
            y.sum().backward(retain_graph=retains)
            assert len(held) == 30 and max(held) <= 10 * BLOCK and torch.equal(x.grad, expected(x, 30))


@pytest.mark.parametrize(("budget", "num_blocks"), [(None, 10), (12 * BLOCK, 6)])
def test_the_size_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int | None, num_blocks: int
) -> None:
    """It is an eighth of what a forward saves, at least 64 MiB, and at most half of the budget."""
    with opened(tmp_path, everything(host_bytes="auto", budget_bytes=budget)) as activations:
        assert activations._store.pool.limit == (64 << 20 if budget is None else 6 * BLOCK)
        monkeypatch.setattr(pool, "_LEAST_BYTES", 2 * BLOCK)
        saved(activations, 81)  # eighty blocks
        assert activations._store.pool.limit == num_blocks * BLOCK >= activations.host_bytes


def test_a_full_pool_stops_nothing(tmp_path: Path) -> None:
    """Without a budget, forward goes on while storage writes nothing: tensors are kept and counted."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK)) as activations:
        hold = Hold(activations._store.files.tensors.core, write_at=0, count=1000)
        x, loss = saved(activations)
        traffic = activations.traffic()
        assert (traffic.offloaded_bytes, traffic.kept_for_room_bytes) == (2 * BLOCK, 9 * BLOCK)
        hold.release()
        assert_right(x, loss)


def test_a_tensor_that_is_larger_than_the_pool(tmp_path: Path) -> None:
    """It stays in memory and is counted, and those after it are evicted. A warning says that the budget is exceeded."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK, budget_bytes=2 * BLOCK)) as activations:
        x = torch.randn(BLOCK, requires_grad=True)
        too_large = f"budget_bytes={2 * BLOCK}.* a tensor of {4 * BLOCK} bytes does not fit into the pool"
        with pytest.warns(UserWarning, match=too_large) as told, activations.forward(x):
            loss = chain(x, 2) + chain(x[: BLOCK // 4] * 2, 6)
        traffic = activations.traffic()
        assert (len(told), traffic.offloaded_bytes, traffic.kept_for_room_bytes) == (1, 6 * BLOCK, 4 * BLOCK)
        loss.backward()
        y = x.detach().requires_grad_()
        (chain(y, 2) + chain(y[: BLOCK // 4] * 2, 6)).backward()
        assert torch.equal(x.grad, y.grad)


def test_storage_is_bounded(tmp_path: Path) -> None:
    """An entry for which storage_bytes leaves no room is kept and counted."""
    with opened(tmp_path, everything(storage_bytes=3 * BLOCK)) as activations:
        x, loss = saved(activations)
        traffic = activations.traffic()
        assert (traffic.offloaded_bytes, traffic.kept_for_room_bytes) == (3 * BLOCK, 8 * BLOCK)
        assert_right(x, loss)


def test_storage_leaves_no_room_for_a_budget(tmp_path: Path) -> None:
    """A warning says that the budget is not kept."""
    settings = everything(host_bytes=BLOCK, budget_bytes=2 * BLOCK, storage_bytes=3 * BLOCK)
    told = f"budget_bytes={2 * BLOCK}.* storage_bytes={3 * BLOCK} leaves no room"
    with opened(tmp_path, settings) as activations, pytest.warns(UserWarning, match=told):
        assert_step_is_right(activations)


def test_others_hold_what_a_budget_has_no_room_for(tmp_path: Path) -> None:
    """A warning says so."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK, budget_bytes=4 * BLOCK)) as activations:

        def step() -> list[torch.Tensor]:
            x = torch.randn(BLOCK // 4, requires_grad=True)
            with activations.forward(x):
                kept = [x]
                for _ in range(8):
                    kept.append(kept[-1].sin())
                loss = chain(kept[-1], 10)
            assert_right(x, loss, 18)
            return kept

        step()
        with pytest.warns(UserWarning, match=f"something else holds tensors of {5 * BLOCK} bytes"):
            step()


def test_the_newest_stay(tmp_path: Path) -> None:
    """With a size as `keep`, what was saved last is neither copied nor written, in every step."""
    with opened(tmp_path, everything(keep=5 * BLOCK)) as activations:
        for step in range(1, 4):
            x, loss = saved(activations)
            assert activations.traffic().kept_bytes == step * 5 * BLOCK and activations._last is not None
            entries = [entry for found in activations._last.entries if (entry := found()) is not None]
            assert [entry.is_original for entry in entries] == 6 * [False] + 5 * [True]
            del entries
            assert_right(x, loss)


def test_the_file_does_not_grow_without_end(tmp_path: Path) -> None:
    """Over a hundred steps of random lengths the file stays as long as a few steps need, and the pool is whole."""
    choose = random.Random(0)
    with opened(tmp_path, everything(host_bytes=16 * BLOCK, budget_bytes=16 * BLOCK)) as activations:
        for _ in range(100):
            x = torch.randn(choose.randint(1, 4 * BLOCK), requires_grad=True)
            with activations.forward(x):
                loss = chain(x, choose.randint(1, 8))
            loss.backward()
        await_that(lambda: activations._store.files.tensors.core.file_bytes <= 2 * 8 * 16 * BLOCK + (2 << 20))
        assert_nothing_is_left(activations)
        assert activations.host_bytes <= 16 * BLOCK


def test_freed_memory_goes_back_twice_in_a_pass(
    activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is returned to the system together, in halves of what forward saves, and in backward alike."""
    calls: list[int] = []
    monkeypatch.setattr("lightning_smartinfinity.activations.eviction.LEAST_FREED", 0)
    monkeypatch.setattr("lightning_smartinfinity.common.freed_memory.return_freed_memory", lambda: calls.append(1))
    earlier = saved(activations)
    finish_writes(activations)  # else the pool has no room for what the next forward saves
    del earlier
    calls.clear()
    _, loss = saved(activations)
    assert len(calls) <= 2  # none, if the writes of all of them end later
    finish_writes(activations)  # backward would take back what waits to be written, and free nothing
    loss.backward()
    assert 1 <= len(calls) <= 4


# ---- settings


def test_defaults_and_text() -> None:
    """Sizes may be text, and are kept as bytes. A dict of settings is as good as an instance."""
    assert ActivationOffload() == ActivationOffload(keep="auto", min_bytes=262144)
    settings = activation_offload({"keep": "1GB", "budget_bytes": "2GiB", "host_bytes": "64MiB"}, owner="x")
    assert settings == ActivationOffload(keep=10**9, budget_bytes=2 << 30, host_bytes=64 << 20)
    assert activation_offload(None, owner="x") is None


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"keep": -1}, "keep=-1"),
        ({"keep": "all"}, "keep='all'"),
        ({"keep": True}, "keep=True"),
        ({"budget_bytes": 4095}, "budget_bytes=4095"),
        ({"host_bytes": 0}, "host_bytes=0"),
        ({"storage_bytes": 1}, "storage_bytes=1"),
        ({"min_bytes": 0}, "min_bytes=0"),
        ({"verify": 1}, "verify=1"),
        ({"keep": 16384, "budget_bytes": 8192, "min_bytes": 1}, "keep=16384, budget_bytes=8192"),
        ({"host_bytes": 8192, "budget_bytes": 4096}, "host_bytes=8192, budget_bytes=4096"),
        ({"host_bytes": 8192, "min_bytes": 8193}, "host_bytes=8192, min_bytes=8193"),
        ({"storage_bytes": 8192, "min_bytes": 8193}, "storage_bytes=8192, min_bytes=8193"),
        ({"budget_bytes": 8191, "min_bytes": 1}, "budget_bytes=8191, min_bytes=1"),
        ({"host_bytes": 1 << 63}, f"host_bytes={1 << 63}"),
        ({"budget": 1}, "no setting 'budget'"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], named: str) -> None:
    """An error names the class, the value and what to do."""
    with refused(ConfigError, named, match="ActivationOffload"):
        ActivationOffload(**settings)


def test_sizes_of_which_one_tensor_fits() -> None:
    """Nothing is refused that moves one tensor of the least size."""
    ActivationOffload(host_bytes=12288, storage_bytes=12288, budget_bytes=12288, min_bytes=8193)
    ActivationOffload(budget_bytes=8192, min_bytes=1)


@pytest.mark.parametrize(
    ("folders", "settings", "named"),
    [
        (None, {}, r"OffloadedActivations\(folders=None\)"),
        ([], {}, r"OffloadedActivations\(folders=\[\]\)"),
        (7, {}, r"OffloadedActivations\(folders=7\)"),
        (["a", "a"], {}, r"OffloadedActivations\(folders=.*twice"),
        ("a", {"settings": 7}, r"OffloadedActivations\(settings=7\)"),
        ("a", {"settings": {"keep": -1}}, "keep=-1"),
        ("a", {"transfer": 7}, r"OffloadedActivations\(transfer=7\)"),
    ],
)
def test_what_the_context_manager_refuses(folders: Any, settings: dict[str, Any], named: str) -> None:
    """Folders and settings are checked as those of a strategy, by the names that they have here."""
    with pytest.raises(ConfigError, match=named):
        OffloadedActivations(folders, **settings)


def test_more_than_storage_has(tmp_path: Path) -> None:
    """Storage needs as much free space as activations may take when the files are opened. No file is left otherwise."""
    activations = OffloadedActivations(tmp_path / "new", settings={"storage_bytes": 1 << 60})
    with pytest.raises(StorageFullError, match=r"activations need .* are free") as raised:
        activations.open()
    assert "storage_bytes" in raised.value.remedy and not (tmp_path / "new").exists()
