"""The cache of state in host memory: same bits, fewer bytes moved, nothing stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lightning_smartinfinity.errors import StorageError
from lightning_smartinfinity.pipeline.layout.partition_layout import with_residents
from lightning_smartinfinity.pipeline.state.windows import Window
from lightning_smartinfinity.storage import measure_space, recover_store
from tests.helpers.native_testing import inject
from tests.pipeline.harness import Case, Run, assert_equal, layout_of, running
from tests.pipeline.wandering import wander

# (format, dtype of the parameters): masters in memory, on storage, and half in each.
FORMATS = [
    ("fp32", torch.float32),
    ("fp32", torch.float16),
    ("bf16", torch.bfloat16),
    ("int8", torch.float32),
    ("int8_remainder", torch.bfloat16),
]
EVERYTHING = 1 << 30
FAULTS = {"fail a read": {"fail_read_at": 1}, "fail a write": {"fail_write_at": 1}}
ROLLED_BACK = ["stop", "stop a part", *FAULTS, "guess wrongly", "commit in vain", "modify in vain"]
DONE = ["step", "step", "modify", "modify a range", "replace", "initialize", "read a parameter", "compare"]


def sizes(case: Case) -> list[int]:
    return [extent.nbytes for extent in layout_of(case).extents.extents]


class Pair:
    """Two runs of the same events, one with a cache and one without."""

    def __init__(self, plain: Run, cached: Run, *, seed: int) -> None:
        self.plain = plain
        self.cached = cached
        self.random = np.random.default_rng(seed)
        self.number = 0

    def both(self, action: Callable[[Run], object]) -> None:
        action(self.plain)
        action(self.cached)

    def happen(self, event: str) -> None:
        self.number += 1
        if event == "modify in vain":
            values = {"exp_avg": np.zeros(12_000, np.float32)}
            with pytest.raises(StorageError, match="elsewhere"):
                self.cached.handler.state.modify({1: values}, together=failing_elsewhere)
        elif event in ROLLED_BACK:
            self.roll_back(event)
        elif event == "step":
            self.both(lambda run: run.step(self.number))
        elif event == "compare":
            self.compare()
        elif event == "read a parameter":
            for name, values in self.plain.handler.state.read_parameter(3).items():
                assert np.array_equal(self.cached.handler.state.read_parameter(3)[name], values, equal_nan=True)
        elif event == "initialize":
            self.both(lambda run: run.handler.initialize(run.outputs()))
        elif event == "replace":
            self.both(replace_all)
        elif event == "modify":
            values = {"exp_avg": self.random.standard_normal(12_000).astype(np.float32)}
            self.both(lambda run: run.handler.state.modify({1: values}))
        else:
            begin = int(self.random.integers(0, 20_000))
            values = {"exp_avg_sq": self.random.random(5_000, np.float32)}
            self.both(lambda run: run.handler.state.modify_range(begin, values))

    def roll_back(self, event: str) -> None:
        """Begin a step of the cached run and roll it back."""
        run, before = self.cached, torch.cat(self.cached.partition)
        plan = run.collect(self.number + 100)
        inject(run.device.pipeline, seed=self.number, max_delay_us=200, **FAULTS.get(event, {}))
        if event == "guess wrongly":
            run.handler.begin_incremental(replace(plan, active=np.ones_like(plan.active)))
            run.handler.step.extend(self.random.permutation(len(run.layout.tasklets)).tolist()[:3])
        else:
            run.handler.begin_step(plan)
        with suppress(StorageError):
            if event == "stop a part":
                run.handler.step.wait([0])
            elif event == "commit in vain":
                run.handler.commit(together=failing_elsewhere)
            elif event != "stop":
                run.handler.finish()
        try:
            run.handler.roll_back()
        except StorageError:  # a fault still pending
            run.handler.roll_back()
        assert torch.equal(torch.cat(run.partition).view(torch.uint8), before.view(torch.uint8))
        inject(run.device.pipeline)

    def compare(self) -> None:
        assert_equal(settled(self.cached), self.plain.state())


@contextmanager
def failing_elsewhere() -> Iterator[None]:
    """Fail on another rank after this one has committed."""
    yield
    raise StorageError("elsewhere", "")


def settled(run: Run) -> dict[str, torch.Tensor]:
    try:
        return run.state()
    except StorageError:  # a fault still pending
        return run.state()


def replace_all(run: Run) -> None:
    """Replace all arrays, and the parameters with them."""
    run.handler.state.replace(fill, steps=run.handler.steps)
    for tensor, group in zip(run.partition, run.layout.sub_groups, strict=True):
        tensor.copy_(torch.from_numpy(numbers(group.offset, group.offset + group.numel)))


def fill(window: Window) -> None:
    for number, array in enumerate(window.arrays):
        array[:] = numbers(window.begin, window.end) + number


def numbers(begin: int, end: int) -> NDArray[np.float32]:
    """Return numbers that are exact in bf16."""
    return np.arange(begin, end, dtype=np.float32) % 200


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 1 << 16))
def test_no_bit_depends_on_the_cache(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, seed: int) -> None:
    """Results do not depend on the cache.

    This holds for any size, any places of the other tasklets, and any sequence of steps, failures, speculative updates,
    reads and writes.
    """
    name, dtype = data.draw(st.sampled_from(FORMATS))
    durable = data.draw(st.booleans())
    staged = data.draw(st.booleans())
    case = Case(
        dtype=dtype,
        state_format=name,
        durability="step" if durable else "none",
        num_devices=data.draw(st.integers(1, 3)),
        num_buffers=data.draw(st.integers(2, 4)),
        compute_threads=data.draw(st.integers(1, 2)),
        staged=staged,
    )
    events = data.draw(st.lists(st.sampled_from(DONE + ROLLED_BACK * durable), min_size=2, max_size=10))
    cache_bytes = data.draw(st.integers(0, sum(sizes(case))))
    folder = tmp_path_factory.mktemp("pair")
    with running(folder / "plain", case) as plain:
        cached = Run(folder / "cached", case.but(cache_bytes=cache_bytes))
        wander(cached, seed=seed)
        try:
            pair = Pair(plain, cached, seed=seed)
            for event in events:
                pair.happen(event)
            if durable:
                # Check the files before anything reads them through the cache.
                cached.close(remove=False)
                partition = cached.partition
                cached = Run(folder / "cached", case, recover=True)
                cached.partition = partition
            pair.cached = cached
            pair.compare()
        finally:
            cached.close()


@pytest.mark.parametrize("state_format", ["fp32", "int8_remainder"])
@pytest.mark.parametrize("durability", ["step", "power", "none"])
def test_what_is_saved_is_counted(tmp_path: Path, durability: str, state_format: str) -> None:
    """Every byte is counted as moved or as saved: reads with durability, reads and writes without."""
    case = Case(dtype=torch.bfloat16, durability=durability, state_format=state_format, tasklet_bytes=65_536)
    resident = sizes(case)[:2]
    with (
        running(tmp_path / "plain", case) as plain,
        running(tmp_path / "cached", case.but(cache_bytes=sum(resident))) as cached,
    ):
        for run in (plain, cached):
            run.steps(range(3))
            run.state()
        moved, saved = plain.handler.traffic(), cached.handler.traffic()
    assert (moved.cached_read_bytes, moved.cached_write_bytes) == (0, 0)
    assert saved.shared_read_bytes + saved.cached_read_bytes == moved.shared_read_bytes
    assert saved.shared_write_bytes + saved.cached_write_bytes == moved.shared_write_bytes
    assert saved.cached_read_bytes > 0
    assert (saved.cached_write_bytes > 0) == (durability == "none")
    if state_format == "fp32":
        # The first tasklet is all of parameter 1, which has no gradient at one step of three. Then all is read once.
        assert saved.cached_read_bytes == 3 * resident[0] + 4 * resident[1]
        # Those of the first state and of the three steps.
        assert saved.cached_write_bytes in (0, 3 * resident[0] + 4 * resident[1])


def test_resident_tasklets_are_never_read_again(tmp_path: Path) -> None:
    """With all state in memory a step reads nothing. Without durability it writes nothing and takes no space."""
    for durability in ("step", "none"):
        case = Case(durability=durability, cache_bytes=EVERYTHING, num_devices=2)
        with running(tmp_path / durability, case) as run:
            assert run.handler.cache_bytes == sum(sizes(case))
            before = run.handler.traffic()
            run.steps(range(3))
            after = run.handler.traffic()
            assert after.read_calls == before.read_calls == 0
            assert (after.write_calls > before.write_calls) == (durability == "step")
            files = [folder / "default" / "rank-00000" / "state.bin" for folder in run.folders]
            assert (sum(file.stat().st_size for file in files) == 0) == (durability == "none")


def test_a_rolled_back_step_is_read_again_once(tmp_path: Path) -> None:
    """A rollback reads the previous generation into the cache, so the next step reads nothing."""
    with running(tmp_path, Case(cache_bytes=EVERYTHING)) as run:
        run.handler.begin_step(run.collect(1))
        run.handler.finish()
        run.handler.roll_back()
        rolled_back = run.handler.traffic().read_calls
        assert rolled_back > 0
        run.step(1)
        assert run.handler.traffic().read_calls == rolled_back


@pytest.mark.parametrize("written_through", [True, False])
def test_whole_tasklets_from_the_first_on(written_through: bool) -> None:
    """The cache holds whole tasklets from the first on. Without write-through the files hold only the others."""
    case = Case(durability="step" if written_through else "none", num_devices=2)
    layout = layout_of(case)
    nbytes = [extent.nbytes for extent in layout.extents.extents]
    for given_bytes, count in ((0, 0), (nbytes[0] - 1, 0), (nbytes[0], 1), (sum(nbytes) - 1, len(nbytes) - 1)):
        cut = with_residents(layout, nbytes=given_bytes, written_through=written_through)
        assert cut.num_resident == count
        on_storage = nbytes if written_through else nbytes[count:]
        places = [cut.extents.num_places(device) for device in range(2)]
        assert sum(places) == len(on_storage) * case_places(case)
        assert max(places) - min(places) <= case_places(case)
        assert cut.extents.place_bytes == max(on_storage)


def case_places(case: Case) -> int:
    return 1 if case.durability == "none" else 2


def test_space_is_needed_for_what_is_on_storage(tmp_path: Path) -> None:
    """The space check leaves out tasklets that are only in memory."""
    needs = []
    for cache_bytes in (0, sizes(Case())[0]):
        extents = layout_of(Case(durability="none", cache_bytes=cache_bytes)).extents
        (request,) = measure_space([tmp_path], job="default", rank=0, extents=extents, num_parameters=1)
        needs.append(request.needed_bytes)
    assert needs[0] - needs[1] == sizes(Case())[0]


def test_a_store_with_state_in_memory_is_not_recovered(tmp_path: Path) -> None:
    """A store with state only in memory is refused with the reason. The same store without a cache is recovered."""
    case = Case(durability="none")
    for cache_bytes in (0, sizes(case)[0]):
        run = Run(tmp_path / str(cache_bytes), case.but(cache_bytes=cache_bytes))
        run.step(1)
        run.close(remove=False)
    recover_store([tmp_path / "0" / "disk0"]).close(remove=True)
    with pytest.raises(StorageError, match="1 tasklets were in the memory") as caught:
        recover_store([tmp_path / str(sizes(case)[0]) / "disk0"])
    assert "checkpoint" in caught.value.remedy
