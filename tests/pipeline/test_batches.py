"""Spans and pieces equal those found element by element, and so do the batches made of them."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_smartinfinity.pipeline.layout.batches import cut, pieces_within, spans_of, tasklets_in
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.pipeline.rules import rule_for
from lightning_smartinfinity.pipeline.state.work import choose_updates
from tests.pipeline.harness import Case, layout_of
from tests.pipeline.test_layout import layouts


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
