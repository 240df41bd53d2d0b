"""Memory and places live as long as the graph needs them, whatever happens to it."""

from __future__ import annotations

import gc
from _thread import interrupt_main
from collections import deque
from contextlib import suppress
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import graph
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smartinfinity.activations import (
    OffloadedActivations,
    entries,
    files,
    forwards,
    geometry,
    offloading,
    packing,
    pool,
    reads,
    store,
    writes,
)
from lightning_smartinfinity.activations.cuda.copies import UnderWay
from lightning_smartinfinity.errors import StorageError
from tests.activations.chains import (
    BLOCK,
    activations,
    assert_nothing_is_left,
    assert_right,
    assert_step_is_right,
    expected,
    inject_now,
    saved,
)
from tests.activations.models import everything, opened
from tests.helpers.interrupts import Interrupt
from tests.helpers.long_cases import long_but
from tests.native.builds import assert_in_fork
from tests.native.test_deadlines import interrupted

__all__ = ["activations"]


def test_forward_frees_what_is_offloaded(tmp_path: Path) -> None:
    """A storage that nobody else holds is gone as soon as it was copied into the pool."""
    with opened(tmp_path) as activations:
        x = torch.randn(1000, requires_grad=True)
        with activations.forward(x):
            y = x * 2
            alive = StorageWeakRef(y.untyped_storage())
            loss = y.exp().sum()
            del y
            assert alive.expired()
        loss.backward()


def test_a_dropped_graph_frees_what_passed_through(tmp_path: Path) -> None:
    """A tensor that is too small to move, and that the node which computes it saves, is gone with that node."""
    with opened(tmp_path, everything(min_bytes=BLOCK)) as activations:
        x = torch.randn(10, requires_grad=True)
        with activations.forward(x):
            y = x.exp()
        alive = StorageWeakRef(y.untyped_storage())
        del y
        assert alive.expired() and activations.traffic().saved_bytes == 0


def test_backward_frees_everything(activations: OffloadedActivations) -> None:
    """After backward no memory of the pool and no place on storage is taken, without a call of ours."""
    gc.disable()
    try:
        x, loss = saved(activations)
        assert activations.storage_bytes > 4 * BLOCK and 0 < activations.held_bytes <= 4 * BLOCK
        assert_right(x, loss)
        assert_nothing_is_left(activations)
        assert activations.traffic().held_up_seconds > 0
    finally:
        gc.enable()


def test_a_dropped_graph_frees_everything(activations: OffloadedActivations) -> None:
    """A graph that nobody runs backward gives its memory and places back, also while it is being written."""
    for _ in range(20):
        saved(activations)
    assert_nothing_is_left(activations)


def test_a_retained_graph_is_read_again(activations: OffloadedActivations) -> None:
    """Backward may run as often as the graph is retained, in the memory of the pool."""
    x, loss = saved(activations)
    for _ in range(3):
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(found, expected(x))
        del found
        # One block more may be in use. On a device lie what was used last and the next one.
        assert activations.held_bytes <= (5 if x.device.type == "cpu" else 7) * BLOCK
    del loss
    assert_nothing_is_left(activations)


@pytest.mark.parametrize(
    "steps",
    [
        [(4, True, 4), (4, True, 0), (4, True, 0)],
        [(4, True, 4), (4, False, 0), (4, False, 4)],
        [(4, True, 4), (5, False, 5)],
    ],
    ids=["held", "no longer held", "another one in its place"],
)
def test_what_somebody_holds(tmp_path: Path, steps: list[tuple[int, bool, int]]) -> None:
    """A tensor that the caller keeps is written once, and not again until a step after it was released.

    What is larger is offloaded at once. Each step has a number of blocks, whether the caller keeps them, and how many
    are offloaded.
    """
    with opened(tmp_path) as activations:
        for blocks, is_kept, offloaded in steps:
            x = torch.randn(blocks * BLOCK // 4, requires_grad=True)
            before = activations.traffic()
            with activations.forward(x):
                held = (x * 2).exp()
                loss = held.sin().sum()
                if not is_kept:
                    del held
            loss.backward()
            traffic = activations.traffic()
            assert traffic.offloaded_bytes - before.offloaded_bytes == offloaded * BLOCK
            assert traffic.freed_nothing_bytes - before.freed_nothing_bytes == is_kept * offloaded * BLOCK
            if is_kept:
                assert traffic.kept_elsewhere_bytes - before.kept_elsewhere_bytes == (blocks - offloaded) * BLOCK


# ---- interrupts


def test_an_interrupt_in_backward(activations: OffloadedActivations) -> None:
    """Ctrl-C ends the wait for storage. The graph can be run again, and gives everything back."""
    x, loss = saved(activations)
    inject_now(activations, seed=1, delay_us=60_000)
    with interrupted():
        torch.autograd.grad(loss, x, retain_graph=True)
    inject_now(activations)
    (found,) = torch.autograd.grad(loss, x)
    assert torch.equal(found, expected(x))
    del loss
    assert_nothing_is_left(activations)


def test_an_interrupt_in_forward(activations: OffloadedActivations) -> None:
    """Ctrl-C ends a forward that waits for storage. The next one is right."""
    inject_now(activations, seed=1, delay_us=60_000)
    with interrupted():
        saved(activations)
    inject_now(activations)
    assert_step_is_right(activations)
    assert_nothing_is_left(activations)


# Without eviction, which counts in lines between which no signal comes.
MODULES = (entries, files, forwards, geometry, graph, offloading, packing, pool, reads, store, writes)


@pytest.mark.parametrize("every", long_but([41], [3, 41]))
def test_an_interrupt_on_any_line(activations: OffloadedActivations, every: int) -> None:
    """After Ctrl-C on any line of forward or backward no hook and no entry remains, and the next step is right."""
    line, came = 0, True
    while came:
        with suppress(KeyboardInterrupt), Interrupt(line, MODULES).coming():
            assert_step_is_right(activations)
            came = False
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_nothing_is_left(activations)
        assert_step_is_right(activations)
        line += every
    assert line > 1000


def test_an_interrupt_when_entries_are_dropped(activations: OffloadedActivations) -> None:
    """It is raised. Within code of Python that deletes an object it would be ignored."""
    graphs = [saved(activations)[1]]
    with pytest.raises(KeyboardInterrupt):
        deque(map(methodcaller("__call__"), (interrupt_main, graphs.clear)), maxlen=0)
    assert_nothing_is_left(activations)


def test_an_interrupt_when_versions_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor does not look changed afterwards."""
    setter, tensor = torch._C._autograd._unsafe_set_version_counter, torch.zeros(3)

    def interrupt(*arguments: Any) -> None:
        monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", setter)
        setter(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", interrupt)
    with pytest.raises(KeyboardInterrupt):
        geometry.shares_changes(tensor, tensor.view(3))
    assert tensor._version == 0


class Interrupted(deque[Any]):
    """A queue behind each of whose calls an interrupt comes."""

    def append(self, item: Any) -> None:
        super().append(item)
        raise KeyboardInterrupt

    def popleft(self) -> Any:
        super().popleft()
        raise KeyboardInterrupt


def test_an_interrupt_when_work_of_a_device_is_counted() -> None:
    """The count stays that of the work under way. Otherwise nothing more would be evicted from the device."""
    under_way = UnderWay()
    under_way._points = Interrupted()
    for call in (lambda: under_way.add([], BLOCK), under_way.reap, lambda: under_way.wait(0)):
        with pytest.raises(KeyboardInterrupt):
            call()
        assert under_way.nbytes == sum(nbytes for _, nbytes in under_way._points)
        if not under_way._points:
            with pytest.raises(KeyboardInterrupt):
                under_way.add([], BLOCK)


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_an_interrupt_between_forwards(
    activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No hook stays in effect when Ctrl-C comes as hooks are entered or left."""

    def interrupt(hooks: graph.saved_tensors_hooks, *_: object) -> None:
        if name == "__enter__":
            torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack_hook, hooks.unpack_hook)
        raise KeyboardInterrupt

    monkeypatch.setattr(graph.saved_tensors_hooks, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(activations)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_closing_with_a_graph_alive(activations: OffloadedActivations) -> None:
    """The backward of a graph that is alive then raises, and says what to do."""
    x, loss = saved(activations)
    activations.close()
    activations.close()
    assert activations.traffic().offloaded_bytes > 0 and activations.storage_bytes == 0
    with pytest.raises(StorageError, match=r"removed from storage when their offloading was closed\. Run backward"):
        loss.backward()
    with pytest.raises(StorageError, match="offloading was closed"), activations.forward():
        pass
    assert x.grad is None


def test_a_forked_child(activations: OffloadedActivations) -> None:
    """It refuses forward and backward, and leaves its parent's memory and files alone."""
    x, loss = saved(activations)

    def refuses() -> bool:
        for attempt in (loss.backward, lambda: saved(activations)):
            with pytest.raises(StorageError, match="forked child"):
                attempt()
        activations.close()
        return True

    assert_in_fork(refuses)
    assert_right(x, loss)
