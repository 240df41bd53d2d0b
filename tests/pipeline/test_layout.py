"""The layout's arithmetic agrees with counting element by element."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.native import Blocks
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.pipeline.layout.batches import cut, pieces_within, spans_of, tasklets_in
from lightning_smartinfinity.pipeline.layout.partition_layout import ParameterSlice, PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.state.work import choose_updates
from tests.native.stored import align, region_bytes
from tests.pipeline.harness import Case, layout_of

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
    assert sum(counts) == 2 * len(layout.tasklets)
    assert max(counts) - min(counts) <= 2
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
