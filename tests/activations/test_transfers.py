"""Tensors are written and read once, in the order in which they are wanted, in files without names."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.tuning import tuner
from lightning_smartinfinity.activations.tuning.choice import Choice, Profile
from lightning_smartinfinity.native import IoClass
from lightning_smartinfinity.storage import StoredTensor, TensorStore
from tests.activations.chains import (
    BLOCK,
    activations,
    assert_nothing_is_left,
    assert_step_is_right,
    chain,
    expected,
    inject_now,
    saved,
)
from tests.activations.models import drop_memory, everything, finish_writes, opened
from tests.helpers.native_testing import Hold, Throttle
from tests.helpers.waiting import await_that, join

__all__ = ["activations"]


def test_each_entry_is_read_once(tmp_path: Path) -> None:
    """However many nodes want an entry, it is written once and read once."""
    with opened(tmp_path, everything(host_bytes=64 << 20)) as activations:
        x = torch.randn(3, BLOCK, requires_grad=True)
        with activations.forward(x):
            y = x * 2
            loss = (y * y.t().exp().t() * y.flatten().sin().view(3, -1)).sum()
            del y
        drop_memory(activations)
        loss.backward()
        traffic = activations.traffic()
        assert traffic.deduplicated == 2 and traffic.read_bytes == traffic.written_bytes


def test_what_is_read_back_is_handed_out_without_a_copy(tmp_path: Path) -> None:
    """Backward gets memory of the pool, which is in use as long as the tensor is."""
    with opened(tmp_path) as activations:
        x = torch.randn(BLOCK // 4, requires_grad=True)
        with activations.forward(x):
            node: Any = (x * 2).exp().grad_fn  # which saves its result
        drop_memory(activations)
        found = node._saved_result.detach()
        assert torch.equal(found, (x * 2).exp())
        del node
        await_that(lambda: activations.storage_bytes == 0)
        assert activations.held_bytes == BLOCK
        del found
        assert activations.held_bytes == 0


def test_what_is_wanted_early_is_forwarded(tmp_path: Path) -> None:
    """A tensor whose write has not begun is handed out from the pool, and its write is cancelled."""
    with opened(tmp_path) as activations:
        hold = Hold(activations._store.files.tensors.core, write_at=0, count=1000)
        assert_step_is_right(activations)
        hold.release()
        assert_nothing_is_left(activations)
        traffic = activations.traffic()
        assert traffic.forwarded_bytes == traffic.offloaded_bytes > 0 and traffic.read_bytes == 0


def test_what_is_wanted_next_is_read_ahead(tmp_path: Path) -> None:
    """While backward waits for an entry, those behind it are read, within half of the pool."""
    with opened(tmp_path, everything(host_bytes=8 * BLOCK, budget_bytes=8 * BLOCK)) as activations:
        for _ in range(2):  # in reversed order of packing, and in the order of the step before
            x, loss = saved(activations, 40)
            inject_now(activations)  # nothing is in flight
            hold = Hold(activations._store.files.tensors.core, read_at=0, count=1000)
            backward = threading.Thread(target=loss.backward)
            backward.start()
            await_that(lambda hold=hold: hold.count >= 4)
            assert hold.count <= 5
            hold.release()
            join(backward)
            assert torch.equal(x.grad, expected(x, 40))


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, IoClass]]:
    """Return the list of all transfers to come: direction, number of the tensor on storage, class."""
    added, started = list[StoredTensor](), list[tuple[str, int, IoClass]]()
    add, read, write = TensorStore.add, TensorStore.read, TensorStore.write

    def note(kind: str, begin: Any, self: TensorStore, stored: StoredTensor, memory: Any, **others: Any) -> int:
        started.append((kind, next(n for n, each in enumerate(added) if each is stored), others["io_class"]))
        ticket: int = begin(self, stored, memory, **others)
        return ticket

    def note_added(self: TensorStore, nbytes: int) -> StoredTensor:
        added.append(add(self, nbytes))
        return added[-1]

    monkeypatch.setattr(TensorStore, "add", note_added)
    monkeypatch.setattr(TensorStore, "read", lambda *args, **others: note("read", read, *args, **others))
    monkeypatch.setattr(TensorStore, "write", lambda *args, **others: note("write", write, *args, **others))
    return started


def test_what_is_written_and_read(activations: OffloadedActivations, requests: list[tuple[str, int, IoClass]]) -> None:
    """Forward keeps the newest tensors in the pool, and backward reads each of the others once.

    Writes go last, and reads that backward waits for go before read-ahead, of which a second backward has none.
    """
    x, loss = saved(activations, 40)
    finish_writes(activations)
    assert {(kind, io_class) for kind, _, io_class in requests} == {("write", IoClass.WRITE_BEHIND)}
    entries = [entry for found in activations._last.entries if (entry := found()) is not None]
    are_in_memory = [entry.memory is not None or entry.is_original for entry in entries]
    assert are_in_memory == sorted(are_in_memory) and 0 < sum(are_in_memory) < len(entries) == 39
    drop_memory(activations)
    requests.clear()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert len(requests) == sum(not entry.is_original for entry in entries)
    assert ("read", IoClass.GATHER) in {(kind, io_class) for kind, _, io_class in requests}
    requests.clear()
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected(x, 40))
    assert {(kind, io_class) for kind, _, io_class in requests} == {("read", IoClass.AWAITED)}


def test_read_ahead_follows_the_backward_before(tmp_path: Path, requests: list[tuple[str, int, IoClass]]) -> None:
    """The first backward is expected to want the newest first, the next one what the first one has wanted."""
    with opened(tmp_path, everything(host_bytes=8 * BLOCK, budget_bytes=8 * BLOCK)) as activations:
        for expected_next in (1, 0):
            x = torch.randn(BLOCK // 4, requires_grad=True)
            with activations.forward(x):
                losses = [chain(x, 10) for _ in range(3)]  # each saves nine tensors besides the batch
            first = min(number for kind, number, _ in requests if kind == "write")
            drop_memory(activations)
            requests.clear()
            torch.autograd.grad(losses[2], x)
            ahead = [number - first for _, number, io_class in requests if io_class == IoClass.GATHER]
            assert ahead and ahead[-1] // 9 == expected_next
            for each in (0, 1):
                torch.autograd.grad(losses[each], x)
            requests.clear()


# ---- rates are those of storage, however slowly forward and backward use it


ENTRIES = 6
# Of a tensor that is cut into four parts, which are transferred at once.
NBYTES_OF_PARTS = 16 << 20
RATE_OF_PARTS = 1e8
PAUSE = 3 * NBYTES_OF_PARTS / RATE_OF_PARTS


def test_rates_of_storage_that_has_little_to_do(tmp_path: Path) -> None:
    """Only the time of transfers counts: storage that waits for the next tensor is not slow."""
    with opened(tmp_path, everything(host_bytes=3 * NBYTES_OF_PARTS)) as offloaded:
        store = offloaded._store
        Throttle(store.files.tensors.core, store.files.tensors._files.files).bytes_per_second = RATE_OF_PARTS
        x = torch.ones(NBYTES_OF_PARTS // 4, requires_grad=True)
        y = x
        with offloaded.forward(x):
            for _ in range(2):  # which takes longer than storage needs for what is saved, forward and backward
                y = (y * 2).sin()
                y.register_hook(lambda _: time.sleep(PAUSE))
                time.sleep(PAUSE)
        drop_memory(offloaded)
        y.sum().backward()
        rates = store.update_rates()
        # The pauses would make it a quarter, and the mean of the parts' own rates 0.4 of it.
        assert 0.5 * RATE_OF_PARTS < rates.write < 1.05 * RATE_OF_PARTS
        assert 0.5 * RATE_OF_PARTS < rates.read < 1.05 * RATE_OF_PARTS


@pytest.mark.parametrize(
    ("slow_from", "expected"),
    [(0, [0, 0, 0, 0, 2, *5 * [0], 2, 5, 5]), (3, [0, 0, 5, 5, 0, 0, 2, *5 * [0], 2, 5, 5])],
)
def test_storage_that_was_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_from: int, expected: list[int]
) -> None:
    """It is used again once it is fast, although nothing has been written for long, and nothing read.

    When backward waits, the rates are those of the last micro-batch, however fast storage was before.
    What has room in the pool is tried first. Backward waits for none of that, even if storage is still slow.
    """
    nbytes, rate = 16 << 10, 2e5
    nothing = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}

    def all_but_one_or_none(profile: Profile, **_: Any) -> Choice:
        is_fast = min(profile.write_rate, profile.read_rate) > 2 * rate
        return Choice(num_offloaded=is_fast * (ENTRIES - 1), **nothing)

    monkeypatch.setattr(tuner, "choose", all_but_one_or_none)
    monkeypatch.setattr(tuner, "_PATIENCE", 3)
    offloaded = []
    with opened(tmp_path, ActivationOffload(min_bytes=1, host_bytes=2 * nbytes)) as activations:
        store = activations._store
        throttle = Throttle(store.files.tensors.core, store.files.tensors._files.files)
        x = torch.ones(nbytes // 4, requires_grad=True)
        for step in range(len(expected)):
            is_slow = slow_from <= step < slow_from + 6  # until it was tried again in vain
            throttle.bytes_per_second = rate if is_slow else 0
            with activations.forward(x):  # learns from the step before
                offloaded.append(activations._tuner.plan.offloaded_bytes // nbytes)
                y = x
                for _ in range(ENTRIES):
                    y = (y * 2).sin()
            (finish_writes if offloaded[-1] == 2 else drop_memory)(activations)
            y.sum().backward()
            activations._last.waited_seconds = 1e3 * (is_slow and offloaded[-1] > 2)
    assert offloaded == expected
