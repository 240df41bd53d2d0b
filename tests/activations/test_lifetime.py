"""Memory and places live as long as the graph needs them, whatever happens to it."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.forwards import Plan
from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.native import IoClass
from lightning_smartinfinity.store import StoredTensor, TensorStore
from tests.activations.models import drop_memory, everything, finish_writes, opened
from tests.helpers.long_cases import long_but
from tests.helpers.native_testing import Hold, inject
from tests.helpers.unnamed import unnamed_files
from tests.helpers.waiting import await_that, join
from tests.native.test_interrupt import interrupted

BLOCK = 4096


@pytest.fixture
def activations(tmp_path: Path) -> Iterator[OffloadedActivations]:
    """Yield offloading of everything through a pool for some blocks, which forward waits for."""
    with opened(tmp_path, everything(host_bytes=4 * BLOCK, budget_bytes=4 * BLOCK)) as activations:
        yield activations


def chain(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x.sum()


def saved(activations: OffloadedActivations, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input of one block, and a loss."""
    x = torch.randn(BLOCK // 4, requires_grad=True)
    with activations.forward(x):
        return x, chain(x, length)


def inject_now(activations: OffloadedActivations, **faults: int) -> None:
    """Inject faults, or none, once the requests in flight have ended."""

    def could() -> bool:
        with suppress(ValueError):
            inject(activations._store.files.core, **faults)
            return True
        return False

    await_that(could)


def expected(x: torch.Tensor, length: int = 12) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(chain(x, length), x)
    return gradient


def assert_nothing_is_left(activations: OffloadedActivations) -> None:
    def is_free() -> bool:
        activations.traffic()  # looks at what has ended
        return (activations.held_bytes, activations.storage_bytes) == (0, 0)

    await_that(is_free, told=lambda: f"{activations.held_bytes} {activations.storage_bytes}")


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


def test_backward_frees_everything(activations: OffloadedActivations) -> None:
    """After backward no memory of the pool and no place on storage is taken, without a call of ours."""
    gc.disable()
    try:
        x, loss = saved(activations)
        assert activations.storage_bytes > 4 * BLOCK and 0 < activations.held_bytes <= 4 * BLOCK
        loss.backward()
        assert torch.equal(x.grad, expected(x))
        assert_nothing_is_left(activations)
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


def test_backward_stays_below_the_budget(tmp_path: Path) -> None:
    """Where much stays in memory, less is read back at once than the pool has room for."""
    with opened(tmp_path, everything(keep=8 * BLOCK, host_bytes=5 * BLOCK, budget_bytes=10 * BLOCK)) as activations:
        for _ in range(2):
            x, held = torch.randn(BLOCK // 4, requires_grad=True), list[int]()
            with activations.forward(x):
                y = x
                for _ in range(30):
                    y = y.sin()
                    y.register_hook(lambda _, held=held: held.append(activations.held_bytes))
            y.sum().backward()
            assert len(held) == 30 and max(held) <= 10 * BLOCK
            assert torch.equal(x.grad, expected(x, 30))


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_budget_that_cannot_be_kept(tmp_path: Path, is_kept: bool) -> None:
    """Where tensors cannot leave, because they are larger than the pool, one warning says so and what to raise."""
    settings = everything(host_bytes=2 * BLOCK, budget_bytes=(30 if is_kept else 3) * BLOCK)
    with opened(tmp_path, settings) as activations, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            x = torch.randn(BLOCK, requires_grad=True)
            with activations.forward(x):
                loss = chain(x, 4)
            loss.backward()
        assert len(told) == (0 if is_kept else 1)
        for each in told:
            assert "16384 bytes are held for backward, because a tensor of 16384" in str(each.message)
            assert "Raise host_bytes" in str(each.message)


def test_two_forwards_before_a_backward(activations: OffloadedActivations) -> None:
    """Losses of two forwards may be added."""
    (x, one), (y, other) = saved(activations), saved(activations)
    (one + other).backward()
    assert torch.equal(x.grad, expected(x)) and torch.equal(y.grad, expected(y))
    assert_nothing_is_left(activations)


def test_a_gradient_of_a_gradient(activations: OffloadedActivations) -> None:
    """create_graph records backward without offloading it, and both gradients are right."""
    x, loss = saved(activations)
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    y = x.detach().clone().requires_grad_()
    (first_expected,) = torch.autograd.grad(chain(y), y, create_graph=True)
    (second_expected,) = torch.autograd.grad(first_expected.square().sum(), y)
    assert torch.equal(first, first_expected) and torch.equal(second, second_expected)


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


def test_what_is_wanted_early_is_forwarded(tmp_path: Path) -> None:
    """A tensor whose write has not begun is handed out from the pool, and its write is cancelled."""
    with opened(tmp_path) as activations:
        hold = Hold(activations._store.files.core, write_at=0, count=1000)
        x, loss = saved(activations)
        loss.backward()
        assert torch.equal(x.grad, expected(x))
        hold.release()
        assert_nothing_is_left(activations)
        traffic = activations.traffic()
        assert traffic.forwarded_bytes == traffic.offloaded_bytes > 0 and traffic.read_bytes == 0


def test_a_full_pool_stops_nothing(tmp_path: Path) -> None:
    """Without a budget, forward goes on while storage writes nothing: tensors are kept and counted."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK)) as activations:
        hold = Hold(activations._store.files.core, write_at=0, count=1000)
        x, loss = saved(activations)
        traffic = activations.traffic()
        assert (traffic.offloaded_bytes, traffic.kept_for_room_bytes) == (2 * BLOCK, 9 * BLOCK)
        hold.release()
        loss.backward()
        assert torch.equal(x.grad, expected(x))


def test_a_tensor_that_is_larger_than_the_pool(tmp_path: Path) -> None:
    """It stays in memory and is counted, and those behind it leave. A warning says that the budget is not kept."""
    with opened(tmp_path, everything(host_bytes=2 * BLOCK, budget_bytes=2 * BLOCK)) as activations:
        x = torch.randn(BLOCK, requires_grad=True)
        too_large = f"budget_bytes={2 * BLOCK}.* a tensor of {4 * BLOCK} bytes does not fit into the pool"
        with pytest.warns(UserWarning, match=too_large) as told, activations.forward(x):
            loss = chain(x, 2) + chain(x[: BLOCK // 4] * 2, 6)
        traffic = activations.traffic()
        assert len(told) == 1
        assert (traffic.offloaded_bytes, traffic.kept_for_room_bytes) == (6 * BLOCK, 4 * BLOCK)
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
        loss.backward()
        assert torch.equal(x.grad, expected(x))


def test_storage_leaves_no_room_for_a_budget(tmp_path: Path) -> None:
    """A warning says that the budget is not kept."""
    settings = everything(host_bytes=BLOCK, budget_bytes=2 * BLOCK, storage_bytes=3 * BLOCK)
    with opened(tmp_path, settings) as activations:
        with pytest.warns(UserWarning, match=f"budget_bytes={2 * BLOCK}.* storage_bytes={3 * BLOCK} leaves no room"):
            x, loss = saved(activations)
        loss.backward()
        assert torch.equal(x.grad, expected(x))


def test_the_newest_stay(tmp_path: Path) -> None:
    """With a size as `keep`, what was saved last is neither copied nor written, in every step."""
    with opened(tmp_path, everything(keep=5 * BLOCK)) as activations:
        for step in range(1, 4):
            x, loss = saved(activations)
            assert activations.traffic().kept_bytes == step * 5 * BLOCK
            loss.backward()
            assert torch.equal(x.grad, expected(x))


def test_what_somebody_holds_is_not_written_again(tmp_path: Path) -> None:
    """A tensor that the caller keeps is counted in the first step and left alone in the next ones."""
    with opened(tmp_path) as activations:
        for step in range(3):
            x = torch.randn(BLOCK, requires_grad=True)
            with activations.forward(x):
                held = (x * 2).exp()
                loss = held.sin().sum()
            loss.backward()
            traffic = activations.traffic()
            assert traffic.freed_nothing_bytes == 4 * BLOCK and traffic.kept_elsewhere_bytes == step * 4 * BLOCK


def test_what_nobody_holds_any_more_is_written_again(tmp_path: Path) -> None:
    """A tensor that the caller has kept and then does not keep is offloaded in the step after."""
    with opened(tmp_path) as activations:
        for is_kept, num_offloaded in ((True, 1), (False, 0), (False, 1)):
            x = torch.randn(BLOCK, requires_grad=True)
            before = activations.traffic().offloaded_bytes
            with activations.forward(x):
                held = (x * 2).exp()
                loss = held.sin().sum()
                if not is_kept:
                    del held
            loss.backward()
            assert activations.traffic().offloaded_bytes - before == num_offloaded * 4 * BLOCK


def test_the_file_does_not_grow_without_end(tmp_path: Path) -> None:
    """Over a hundred steps of random lengths the file stays as long as a few steps need, and the pool is whole."""
    choose = random.Random(0)
    with opened(tmp_path, everything(host_bytes=16 * BLOCK, budget_bytes=16 * BLOCK)) as activations:
        for _ in range(100):
            x = torch.randn(choose.randint(1, 4 * BLOCK), requires_grad=True)
            with activations.forward(x):
                loss = chain(x, choose.randint(1, 8))
            loss.backward()
        largest = 8 * 16 * BLOCK
        await_that(lambda: activations._store.files.core.file_bytes <= 2 * largest + (2 << 20))
        assert_nothing_is_left(activations)
        assert activations.host_bytes <= 16 * BLOCK


def test_ten_thousand_tiny_tensors(tmp_path: Path) -> None:
    """They all pass through with the default size, and can all be offloaded."""
    for min_bytes in (256 * 1024, 1):
        with opened(tmp_path, everything(min_bytes=min_bytes)) as activations:
            num = 10_000 if min_bytes > 1 else 500
            x = torch.ones(3, requires_grad=True)
            with activations.forward():
                loss = chain(x, num)
            assert (activations.traffic().saved_bytes == 0) == (min_bytes > 1)
            loss.backward()
            assert torch.equal(x.grad, expected(x, num))


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
    x, loss = saved(activations)
    loss.backward()
    assert torch.equal(x.grad, expected(x))
    del loss
    assert_nothing_is_left(activations)


def interrupt_once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """Let the next call of a method raise KeyboardInterrupt, as Ctrl-C may."""
    method = getattr(owner, name)

    def interrupt(*_: object) -> None:
        monkeypatch.setattr(owner, name, method)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, interrupt)


def test_an_interrupt_when_an_entry_is_new(activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is gone before its forward knows it is not subtracted without having been added."""
    interrupt_once(monkeypatch, Plan, "frees_nothing")
    with pytest.raises(KeyboardInterrupt):
        saved(activations)
    gc.collect()
    assert activations.held_bytes == 0
    x, loss = saved(activations)
    loss.backward()
    assert torch.equal(x.grad, expected(x))
    del loss
    assert_nothing_is_left(activations)


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_an_interrupt_between_forwards(
    activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """No hook stays in effect when Ctrl-C comes as hooks are entered or left."""

    def interrupt(hooks: saved_tensors_hooks, *_: object) -> None:
        if name == "__enter__":
            torch._C._autograd._push_saved_tensors_default_hooks(hooks.pack_hook, hooks.unpack_hook)
        raise KeyboardInterrupt

    monkeypatch.setattr(saved_tensors_hooks, name, interrupt)
    with pytest.raises(KeyboardInterrupt):
        saved(activations)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_an_interrupt_when_writes_are_given_up(
    activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory of a write that nobody wants any more goes back to the pool when the write has ended."""
    inject_now(activations, seed=1, max_delay_us=50_000)
    _, loss = saved(activations)
    del loss
    interrupt_once(monkeypatch, activations._store.files, "done")
    with pytest.raises(KeyboardInterrupt):
        activations.traffic()
    assert_nothing_is_left(activations)


def test_files_have_no_names(tmp_path: Path) -> None:
    """Nothing is left to be found while it runs, and the file is gone when it is closed."""
    with opened(tmp_path) as activations:
        saved(activations)
        assert len(unnamed_files(tmp_path)) == 1
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    assert unnamed_files(tmp_path) == []


@pytest.mark.parametrize("kills", long_but([5], [5, 50]))
def test_a_process_that_is_killed(kills: int, tmp_path: Path) -> None:
    """Nothing of it is left on storage, whenever it is killed."""
    for seed in range(kills):
        child = os.fork()
        if child == 0:
            try:
                with opened(tmp_path, everything(host_bytes=4 * BLOCK, budget_bytes=4 * BLOCK)) as activations:
                    (tmp_path / "begun").touch()
                    while True:
                        saved(activations)
            finally:
                os._exit(1)
        await_that((tmp_path / "begun").exists)
        time.sleep(seed % 10 / 100)
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        (tmp_path / "begun").unlink()
        assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_is_wanted_next_is_read_ahead(tmp_path: Path) -> None:
    """While backward waits for an entry, those behind it are read, within half of the pool."""
    with opened(tmp_path, everything(host_bytes=8 * BLOCK, budget_bytes=8 * BLOCK)) as activations:
        for _ in range(2):  # in reversed order of packing, and in the order of the step before
            x, loss = saved(activations, 40)
            inject_now(activations)  # nothing is in flight
            hold = Hold(activations._store.files.core, read_at=0, count=1000)
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


def test_classes_of_transfers(activations: OffloadedActivations, requests: list[tuple[str, int, IoClass]]) -> None:
    """Writes go last, and reads that backward waits for go before read-ahead, of which a second backward has none."""
    x, loss = saved(activations, 40)
    assert {(kind, io_class) for kind, _, io_class in requests} == {("write", IoClass.WRITE_BEHIND)}
    drop_memory(activations)
    requests.clear()
    torch.autograd.grad(loss, x, retain_graph=True)
    assert ("read", IoClass.GATHER) in {(kind, io_class) for kind, _, io_class in requests}
    requests.clear()
    torch.autograd.grad(loss, x)
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


def test_several_folders(tmp_path: Path) -> None:
    """Tensors are dealt to the files of all folders."""
    folders = [tmp_path / "a", tmp_path / "b"]
    activations = OffloadedActivations(folders, settings=everything(host_bytes=4 * BLOCK, budget_bytes=4 * BLOCK))
    x, loss = saved(activations, 40)
    await_that(lambda: activations.traffic().written_bytes >= 32 * BLOCK)
    assert [len(unnamed_files(folder)) for folder in folders] == [1, 1]
    loss.backward()
    assert torch.equal(x.grad, expected(x, 40))
    activations.close()


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


def test_freed_memory_goes_back_twice_in_a_pass(
    activations: OffloadedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is returned to the system together, in halves of what forward saves, and in backward alike."""
    calls: list[int] = []
    monkeypatch.setattr("lightning_smartinfinity.activations.departures.LEAST_FREED", 0)
    monkeypatch.setattr("lightning_smartinfinity.freed_memory.return_freed_memory", lambda: calls.append(1))
    saved(activations)
    calls.clear()
    _, loss = saved(activations)
    assert 1 <= len(calls) <= 2
    loss.backward()
    assert 2 <= len(calls) <= 4


def test_files_stay_as_long_as_forwards_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first forward no other one waits until the file system has made room."""
    grown: list[str] = []
    with opened(tmp_path, everything()) as activations:
        x = torch.randn(1 << 18, requires_grad=True)
        for step in range(4):
            with activations.forward(x):
                loss = chain(x, 24)
            finish_writes(activations)
            loss.backward()
            del loss
            if step == 0:
                monkeypatch.setattr(
                    activations._store.files, "_in_time", lambda grow, *, doing: grown.append(doing) or grow()
                )
        assert activations._store.files.storage_bytes == 0 and not grown
        assert activations.traffic().offloaded_bytes == 4 * 23 * x.nbytes  # x itself stays


def test_a_forked_child(activations: OffloadedActivations) -> None:
    """It refuses forward and backward, and leaves its parent's memory and files alone."""
    x, loss = saved(activations)
    child = os.fork()
    if child == 0:
        os._exit(refusals(activations, loss))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss.backward()
    assert torch.equal(x.grad, expected(x))


def refusals(activations: OffloadedActivations, loss: torch.Tensor) -> int:
    """Return 0 if all that a forked child may not do raises."""
    refused = 0
    for attempt in (loss.backward, lambda: saved(activations)):
        try:
            attempt()
        except StorageError as error:
            refused += "forked child" in str(error)
        except BaseException:
            return 1
    del loss
    activations.close()
    return 0 if refused == 2 else 2
