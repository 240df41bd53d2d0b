"""The layout's arithmetic agrees with counting element by element."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import Blocks
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from tests.native.stored import align, region_bytes

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


@given(layouts())
def test_parameters_and_sub_groups_lie_behind_one_another(layout: PartitionLayout) -> None:
    """Parameters lie one after the other, and each sub-group covers exactly its parameters."""
    offset = 0
    for parameter in layout.parameters:
        assert parameter.offset == offset
        offset += parameter.numel
    assert offset == layout.numel
    for group in layout.sub_groups:
        members = [parameter for parameter in layout.parameters if parameter.sub_group == group.index]
        assert members == list(layout.parameters[group.first : group.last])
        assert (group.offset, group.numel) == (members[0].offset, sum(member.numel for member in members))


@given(layouts())
def test_tasklets_cover_the_partition_once(layout: PartitionLayout) -> None:
    """Every element lies in exactly one tasklet. All tasklets but the last hold a multiple of 1024 elements."""
    end = 0
    for index, tasklet in enumerate(layout.tasklets):
        assert (tasklet.index, tasklet.offset) == (index, end)
        assert tasklet.numel > 0
        assert tasklet is layout.tasklets[-1] or tasklet.numel % 1024 == 0
        end += tasklet.numel
    assert end == layout.numel


@given(layouts(), st.data())
def test_parameters_in_tasklets(layout: PartitionLayout, data: st.DataObject) -> None:
    """parameters_in() returns each parameter with an element in the tasklets once, and counts are right."""
    holders = [layout.tasklets_of(slice(index, index + 1)) for index in range(len(layout.parameters))]
    for tasklet, count in zip(layout.tasklets, layout.num_parameters_in.tolist(), strict=True):
        assert count == sum(tasklet.index in held_by for held_by in holders)
    count = len(layout.tasklets)
    wanted = data.draw(st.sets(st.integers(0, max(0, count - 1)), max_size=count))
    expected = [index for index, held_by in enumerate(holders) if not wanted.isdisjoint(held_by)]
    assert layout.parameters_in(wanted).tolist() == expected


@given(layouts(), st.data())
def test_tasklets_of_a_range_of_parameters(layout: PartitionLayout, data: st.DataObject) -> None:
    """tasklets_of() returns exactly the tasklets with an element of the parameters."""
    count = len(layout.parameters)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    elements = [
        element
        for parameter in layout.parameters[first:last]
        for element in (parameter.offset, parameter.offset + parameter.numel - 1)
        if parameter.numel
    ]
    found = layout.tasklets_of(slice(first, last))
    if not elements:
        assert len(found) == 0
        return
    touched = [
        tasklet.index
        for tasklet in layout.tasklets
        if tasklet.offset <= max(elements) and tasklet.offset + tasklet.numel > min(elements)
    ]
    assert list(found) == touched


@given(layouts(), st.data())
def test_parameters_of_a_range_of_elements(layout: PartitionLayout, data: st.DataObject) -> None:
    """parameters_between() returns every parameter with an element in the range, in order, and no distant one."""
    begin = data.draw(st.integers(0, layout.numel))
    end = data.draw(st.integers(begin, layout.numel))
    found = layout.parameters_between(begin, end)
    holding = [p for p in layout.parameters if max(begin, p.offset) < min(end, p.offset + p.numel)]
    assert [p for p in found if p in holding] == holding
    assert all(p.offset <= end and p.offset + p.numel >= begin for p in found)


@given(layouts(), st.data())
def test_sub_group_of_an_element(layout: PartitionLayout, data: st.DataObject) -> None:
    """sub_group_at() returns the sub-group that holds the element."""
    if layout.numel == 0:
        return
    offset = data.draw(st.integers(0, layout.numel - 1))
    group = layout.sub_group_at(offset)
    assert group.offset <= offset < group.offset + group.numel


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
    assert sum(counts) == 2 * len(layout.tasklets)
    assert max(counts) - min(counts) <= 2
    assert [extents.file_bytes(device) for device in range(devices)] == [n * extents.place_bytes for n in counts]
    assert extents.first_assigned.tolist() == [index % devices for index in range(len(layout.tasklets))]


@pytest.mark.parametrize(
    ("name", "item_bytes"), [("fp32", 12), ("bf16", 8), ("int8", 6 + 2 / 256), ("int8_remainder", 6 + 2 / 256)]
)
def test_bytes_per_parameter(name: str, item_bytes: float) -> None:
    """Large parameters take the format's documented bytes, within one percent."""
    slices = [ParameterSlice(name="", numel=50_000_000, real_numel=50_000_000, group=0, sub_group=0)]
    layout = build_layout(
        slices, tasklet_bytes=4 << 20, num_arrays=3, num_devices=1, places_per_tasklet=1, state_format=name
    )
    assert item_bytes <= layout.extents.file_bytes(0) / layout.numel < 1.01 * item_bytes
    assert max(extent.nbytes for extent in layout.extents.extents) > 0.98 * (4 << 20)


def test_crowds_of_tiny_parameters_fit_too() -> None:
    """Tiny parameters take a block each, so tasklets hold fewer elements where they are many."""
    numels = [1_000_000, *[1] * 5_000, 1_000_000]
    slices = [ParameterSlice(name="", numel=n, real_numel=n, group=0, sub_group=0) for n in numels]
    for name in STATE_FORMATS:
        layout = build_layout(
            slices, tasklet_bytes=256 << 10, num_arrays=3, num_devices=1, places_per_tasklet=1, state_format=name
        )
        assert max(extent.nbytes for extent in layout.extents.extents) <= 256 << 10


def test_small_tensors_share_tasklets() -> None:
    """Ten thousand small tensors need no more tasklets than one tensor of their size."""
    slices = [ParameterSlice(name=str(i), numel=10, real_numel=10, group=0, sub_group=0) for i in range(10_000)]
    layout = build_layout(slices, tasklet_bytes=1 << 20, num_arrays=3, num_devices=1, places_per_tasklet=2)
    assert len(layout.tasklets) == 2


@given(layout=layouts(), data=st.data())
def test_tasklets_in_order_of_use(layout: PartitionLayout, data: st.DataObject) -> None:
    """Tasklets are sorted by the earliest use of any of their parameters, and by index if equal."""
    uses = np.array(data.draw(st.permutations(range(len(layout.parameters)))), np.int64)

    def earliest(tasklet: int) -> int:
        where = layout.tasklets[tasklet]
        held = [
            uses[index]
            for index, parameter in enumerate(layout.parameters)
            if max(parameter.offset, where.offset) < min(parameter.offset + parameter.numel, where.offset + where.numel)
        ]
        return int(min(held))

    wanted = data.draw(st.sets(st.sampled_from(range(len(layout.tasklets))))) if layout.tasklets else set()
    assert layout.in_order_of_use(sorted(wanted), uses) == sorted(sorted(wanted), key=earliest)
