"""The layout's arithmetic agrees with counting element by element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.devices import FolderTraffic, HostDevice, Traffic
from lightning_smartinfinity.native import Blocks
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.layout.balance import Balance
from lightning_smartinfinity.pipeline.layout.batches import cut, pieces_within, spans_of, tasklets_in
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.state.work import choose_updates
from lightning_smartinfinity.storage.state import capacities
from tests.helpers.native_testing import Throttle
from tests.native.stored import align, region_bytes
from tests.pipeline.harness import Case, Run, after_steps, assert_equal, layout_of, running
from tests.pipeline.wandering import wander

sizes = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 30_000)), max_size=12)


@st.composite
def layouts(draw: st.DrawFn) -> PartitionLayout:
    sub_group, slices = 0, []
    for index, numel in enumerate(draw(sizes)):
        sub_group += int(index > 0 and draw(st.booleans()))
        real = draw(st.integers(0, numel))
        slices.append(
            ParameterSlice(name=str(index), numel=numel, real_numel=real, group=index % 2, sub_group=sub_group)
        )
    return build_layout(
        slices,
        tasklet_bytes=draw(st.integers(64 * 1024, 200 * 1024)),
        num_arrays=draw(st.integers(1, 4)),
        num_devices=draw(st.integers(1, 4)),
        places_per_tasklet=draw(st.sampled_from([1, 2])),
    )


@given(layouts(), st.data())
def test_as_counted_element_by_element(layout: PartitionLayout, data: st.DataObject) -> None:
    """Offsets, and what lies in tasklets and in ranges, follow from the owner and the tasklet of each element."""
    numels = [parameter.numel for parameter in layout.parameters]
    indices, wanted = range(len(numels)), data.draw(st.sets(st.sampled_from(range(len(layout.tasklets) or 1))))
    owners = np.repeat(indices, numels).astype(int)
    tasklets = np.repeat(range(len(layout.tasklets)), [tasklet.numel for tasklet in layout.tasklets]).astype(int)
    assert len(owners) == len(tasklets) == layout.numel
    assert [parameter.offset for parameter in layout.parameters] == [sum(numels[:index]) for index in indices]
    for index, tasklet in enumerate(layout.tasklets):
        assert (tasklet.index, tasklet.offset) == (index, np.searchsorted(tasklets, index))
        assert tasklet.numel > 0 and (tasklet is layout.tasklets[-1] or tasklet.numel % 1024 == 0)
    for group in layout.sub_groups:
        members = [parameter for parameter in layout.parameters if parameter.sub_group == group.index]
        assert members == list(layout.parameters[group.first : group.last])
        assert (group.offset, group.numel) == (members[0].offset, sum(member.numel for member in members))
    wanted = wanted if layout.tasklets else set()
    holders = [set(tasklets[owners == index].tolist()) for index in indices]
    counts = [sum(tasklet.index in holder for holder in holders) for tasklet in layout.tasklets]
    assert layout.num_parameters_in.tolist() == counts
    assert layout.parameters_in(wanted).tolist() == [index for index in indices if holders[index] & wanted]
    uses = np.array(data.draw(st.permutations(indices)), np.int64)
    earliest = {tasklet: min(uses[index] for index in indices if tasklet in holders[index]) for tasklet in wanted}
    assert layout.in_order_of_use(sorted(wanted), uses) == sorted(wanted, key=lambda each: earliest[each])
    first, last = sorted(data.draw(st.tuples(*2 * [st.integers(0, len(numels))])))
    assert [*layout.tasklets_of(slice(first, last))] == [*np.unique(tasklets[(first <= owners) & (owners < last)])]
    begin, end = sorted(data.draw(st.tuples(*2 * [st.integers(0, layout.numel)])))
    found = layout.parameters_between(begin, end)
    holding = [layout.parameters[index] for index in np.unique(owners[begin:end])]
    assert [parameter for parameter in found if parameter in holding] == holding
    assert all(each.offset <= end and each.offset + each.numel >= begin for each in found)
    if begin < layout.numel:
        assert layout.sub_group_at(begin).index == layout.parameters[owners[begin]].sub_group


@given(
    numels=sizes,
    name=st.sampled_from(sorted(STATE_FORMATS)),
    tasklet_bytes=st.integers(64 * 1024, 200 * 1024),
    num_arrays=st.integers(1, 4),
    devices=st.integers(1, 5),
)
def test_extents(numels: list[int], name: str, tasklet_bytes: int, num_arrays: int, devices: int) -> None:
    """Extents fit their buffer and any place, and have room for arrays, the native core's blocks and a trailer.

    Places are aligned to blocks, two for each tasklet, and divided evenly among the devices.
    """
    layout = build_layout(
        [ParameterSlice(name="", numel=n, real_numel=n, group=0, sub_group=0) for n in numels],
        tasklet_bytes=tasklet_bytes,
        num_arrays=num_arrays if name == "fp32" else 3,
        num_devices=devices,
        places_per_tasklet=2,
        state_format=name,
    )
    extents = layout.extents
    begins = {parameter.offset for parameter in layout.parameters}
    for tasklet, extent in zip(layout.tasklets, extents.extents, strict=True):
        assert extent.nbytes <= min(tasklet_bytes, extents.place_bytes)
        if not extents.format.has_blocks:
            if name == "fp32":
                assert extent.nbytes == num_arrays * align(4 * tasklet.numel) + 4096
            continue
        borders, cells = extents.borders_of(tasklet.index), range(tasklet.offset, tasklet.offset + tasklet.numel, 256)
        inside = {begin for begin in begins if tasklet.offset < begin < tasklet.offset + tasklet.numel}
        assert sorted(inside | set(cells)) == sorted({tasklet.offset + b for b in borders} | set(cells))
        num_blocks = Blocks(list(borders)).count(tasklet.numel)
        assert num_blocks == len(inside | set(cells))
        regions = region_bytes(extents.format.number, tasklet.numel, num_blocks)
        assert extent.nbytes == sum(align(used) for used in regions) + 4096
    assert extents.place_bytes % 4096 == 0
    counts = [extents.num_places(device) for device in range(devices)]
    assert sum(counts) == 2 * len(layout.tasklets) and max(counts) - min(counts) <= 2
    assert [extents.file_bytes(device) for device in range(devices)] == [n * extents.place_bytes for n in counts]
    assert extents.first_assigned.tolist() == [index % devices for index in range(len(layout.tasklets))]


def test_crowds_of_tiny_parameters_fit_too() -> None:
    """Tiny parameters take a block each, so tasklets hold fewer elements where they are many."""
    numels = [1_000_000, *[1] * 5_000, 1_000_000]
    slices = [ParameterSlice(name="", numel=n, real_numel=n, group=0, sub_group=0) for n in numels]
    for name in STATE_FORMATS:
        layout = build_layout(
            slices, tasklet_bytes=256 << 10, num_arrays=3, num_devices=1, places_per_tasklet=1, state_format=name
        )
        assert max(extent.nbytes for extent in layout.extents.extents) <= 256 << 10


# ---- spans and pieces equal those found element by element, and so do the batches made of them


@given(layouts(), st.data())
def test_pieces_cover_every_element_once(layout: PartitionLayout, data: st.DataObject) -> None:
    """Pieces never cross tasklets, sub-groups or keys, and there are no more of them than necessary.

    Those of a run of tasklets are those of the tasklets from the first to the last.
    """
    count = len(layout.parameters)
    keys = data.draw(st.lists(st.integers(-1, 1), min_size=count, max_size=count))
    owner = np.repeat(np.arange(count), [parameter.numel for parameter in layout.parameters])
    labels = [
        (element // layout.extents.tasklet_numel, layout.parameters[owner[element]].sub_group, keys[owner[element]])
        for element in range(layout.numel)
    ]
    borders = [i for i in range(layout.numel) if i == 0 or labels[i] != labels[i - 1]]
    pieces = cut(layout, spans_of(layout, keys))
    assert [piece.begin for piece in pieces] == borders
    assert [piece.end for piece in pieces] == [*borders[1:], layout.numel][: len(borders)]
    assert [(piece.tasklet, piece.sub_group, piece.key) for piece in pieces] == [labels[i] for i in borders]
    assert tasklets_in(pieces) == list(range(len(layout.tasklets)))
    if pieces:
        first, last = sorted(data.draw(st.tuples(*2 * [st.sampled_from(tasklets_in(pieces))])))
        assert [*pieces_within(pieces, [first, last])] == [p for p in pieces if first <= p.tasklet <= last]


def test_ten_thousand_small_parameters_are_few_segments() -> None:
    """They share tasklets and, with equal hyperparameters and step counts, segments, across groups too.

    Another count splits a segment.
    """
    layout = layout_of(Case(shapes=((3, 0, 0, 0), (3, 0, 1, 0)) * 5_000))
    group = torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).param_groups[0]
    rule = rule_for(torch.optim.AdamW([torch.zeros(1, requires_grad=True)]))
    active, steps = np.ones(10_000, np.bool_), np.zeros(10_000, np.int64)

    def num_pieces() -> int:
        updates = choose_updates(layout, rule, [group, dict(group)], active=active, steps=steps, gradient_scale=1.0)
        return len(cut(layout, spans_of(layout, updates.keys)))

    assert num_pieces() == len(layout.tasklets) == 8
    steps[5_000] = 1
    assert num_pieces() == len(layout.tasklets) + 2


# ---- several storage folders: tasklets follow the measured bandwidth, and stay if there is no room


# 65 tasklets, and none of them goes long without a gradient.
LARGE = ((150_000, 0, 0, 0), (100_000, 0, 1, 1), (80_000, 0, 0, 1))
SLOW = 10e6  # bytes per second
FAST = 16 * SLOW


def folder_bytes(run: Run) -> list[int]:
    return [folder.read_bytes + folder.write_bytes for folder in run.handler.traffic().folders]


def steps(run: Run, numbers: range) -> list[float]:
    """Do these steps and return each folder's part of the bytes that were moved."""
    before = folder_bytes(run)
    run.steps(numbers)
    moved = [now - then for now, then in zip(folder_bytes(run), before, strict=True)]
    return [one / sum(moved) for one in moved]


class Metered(HostDevice):
    """A host device whose folders count as busy for their bytes at a given rate, without a clock.

    Args:
        rates: Bytes per second of each folder. A change applies to bytes moved from then on.
    """

    def __init__(self, rates: list[float]) -> None:
        super().__init__(num_buffers=8)
        self.rates = rates
        self._moved = [0] * len(rates)
        self._seconds = [0.0] * len(rates)

    def counters(self) -> Traffic:
        traffic = super().counters()
        for index, folder in enumerate(traffic.folders):
            moved = folder.read_bytes + folder.write_bytes
            self._seconds[index] += (moved - self._moved[index]) / self.rates[index]
            self._moved[index] = moved
        folders = zip(traffic.folders, self._seconds, strict=True)
        return replace(traffic, folders=tuple(replace(folder, busy_seconds=busy) for folder, busy in folders))


@pytest.mark.parametrize("durability", ["step", "none"])
def test_a_slow_folder_has_less_to_do(tmp_path: Path, durability: str) -> None:
    """A slow folder gets fewer tasklets and moves fewer bytes until it is as fast as the others again."""
    device = Metered([FAST, FAST])
    case = Case(num_devices=2, num_buffers=8, shapes=LARGE, durability=durability)
    with running(tmp_path, case, device=lambda run: device) as run:
        num_tasklets = len(run.layout.tasklets)
        device.rates[0] = SLOW
        run.steps(range(4))
        assert run.store.counts[0] <= 1 + num_tasklets * SLOW / (SLOW + FAST) and steps(run, range(4, 6))[0] < 0.1
        written = run.store.tasklet_generations == run.handler.generation
        assert np.array_equal(run.store.placement.devices[written], run.store.assigned[written])
        device.rates[0] = FAST
        run.steps(range(6, 12))
        assert steps(run, range(12, 14))[0] > 0.4 and run.store.counts[0] > 0.4 * num_tasklets


def test_tasklets_that_cannot_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the device cannot move tasklets, they stay in their folders however slow these are."""
    monkeypatch.setattr(HostDevice, "moves_tasklets", False)
    with running(tmp_path, Case(num_devices=2)) as run:
        assigned = run.store.placement.devices.copy()
        Throttle(run.device.pipeline, run.store.files[:1]).bytes_per_second = SLOW
        run.steps(range(4))
        assert np.array_equal(run.store.placement.devices, assigned)
        assert np.array_equal(assigned, np.arange(len(assigned)) % 2)


def test_full_disk_when_tasklets_are_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the disk is full, tasklets stay in their folders and training gives the same bits."""
    expected = after_steps(tmp_path / "one", Case())
    monkeypatch.setattr(capacities, "has_room", lambda *_, **__: False)
    with running(tmp_path / "two", Case(num_devices=2)) as run:
        wander(run)
        length = run.handler.storage_bytes
        run.steps(range(3))
        assert run.handler.storage_bytes == length == 2 * 7 * run.layout.extents.place_bytes
        assert_equal(run.state(), expected)


# ---- the balance between folders: the bandwidths it measures, and the changes that are worth making


MB = 1_000_000


def better(rates: Sequence[float], moved: Sequence[int], counts: Sequence[int]) -> list[int] | None:
    """Return the better counts after a step.

    Each folder moves 1 MB per tasklet, half of it each way, at its rate in MB/s.
    """
    balance = Balance(len(rates))
    assert balance.better(counts) is None, "nothing is known before the first measurement"
    before = [FolderTraffic(read_bytes=7, write_bytes=5, busy_seconds=3.0)] * len(rates)
    step = [
        FolderTraffic(read_bytes=n * MB // 2, write_bytes=n * MB // 2, busy_seconds=n / rate)
        for n, rate in zip(moved, rates, strict=True)
    ]
    balance.begin(before)
    balance.end([one + two for one, two in zip(before, step, strict=True)])
    found = balance.better(counts)
    return None if found is None else found.tolist()


@pytest.mark.parametrize(
    ("rates", "moved", "counts", "expected"),
    [
        ([300, 100], [20, 20], [20, 20], [30, 10]),
        ([100, 100, 200], [8, 8, 8], [8, 8, 8], [6, 6, 12]),
        ([150, 100], [50, 50], [50, 50], [60, 40]),
        ([106, 100], [50, 50], [50, 50], None),
        ([150, 100], [60, 40], [60, 40], None),
        ([110, 100], [3, 2], [3, 2], None),
        ([100, 10], [5, 0], [5, 5], None),  # nothing is known of the bandwidth of a folder that moved nothing
    ],
)
def test_proportional_to_bandwidth(
    rates: list[float], moved: list[int], counts: list[int], expected: list[int] | None
) -> None:
    """A folder gets tasklets in proportion to its bandwidth, if that saves a tenth of the step's time.

    Even two disks of one model differ in speed.
    """
    assert better(rates, moved, counts) == expected


@given(st.data(), st.integers(2, 5))
def test_a_change_is_never_for_the_worse(data: st.DataObject, folders: int) -> None:
    """A change makes the step at least a tenth faster, and no other change follows at the same bandwidths."""
    rates = data.draw(st.lists(st.floats(0.1, 1e4), min_size=folders, max_size=folders))
    counts = data.draw(st.lists(st.integers(1, 60), min_size=folders, max_size=folders))
    found = better(rates, counts, counts)
    if found is not None:
        assert sum(found) == sum(counts)
        before, after = (max(n / r for n, r in zip(numbers, rates, strict=True)) for numbers in (counts, found))
        assert before > 1.09 * after and better(rates, counts, found) is None
