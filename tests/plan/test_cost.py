"""Where compression is worth switching on."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_smartinfinity.compression import TopK
from lightning_smartinfinity.plan.cost import gain_of, gain_on_cards, gain_on_host, published_smartssds
from lightning_smartinfinity.plan.gradients import Dense, TopKPayload
from lightning_smartinfinity.plan.handler import Route
from lightning_smartinfinity.plan.workload import Workload

TOP_K = TopKPayload(0.01, 2)


def dense(item_bytes: int = 2) -> Workload:
    return Workload(numel=1, gradients=Dense(item_bytes), parameter_bytes=item_bytes)


@pytest.mark.parametrize(
    ("settings", "gains"),
    [
        ({"num_cards": 0}, False),
        ({"num_cards": 4}, False),
        ({"num_cards": 20}, True),
        ({"num_cards": 20, "num_cores": 1}, False),
        ({"num_cards": 4, "route": Route.STORAGE}, True),
    ],
)
def test_of_a_codec_on_published_cards(settings: dict[str, Any], gains: bool) -> None:
    """Many cards that wait for their channel and cores enough to choose, or gradients that pass through the SSDs."""
    assert gain_of(TopK(0.01), dense(4), **({"num_cores": 32} | settings)).gains == gains


def test_values_of_another_type() -> None:
    """Fewer bytes of values leave more of the channel."""
    of = {"num_cards": 40, "num_cores": 64}
    narrow, wide = (gain_of(TopK(0.2, value_dtype=dtype), dense(4), **of).ratio for dtype in ("bf16", "auto"))
    assert narrow > wide > 1


def test_never_on_the_host() -> None:
    """Its gradients are where they are used."""
    gain = gain_on_host()
    assert not gain.gains
    assert "host memory" in gain.reason


def test_not_where_the_ssds_are_what_is_waited_for() -> None:
    """A few devices, gradients from host memory: the channel has room."""
    gain = gain_on_cards(published_smartssds(4), dense(), TOP_K)
    assert not gain.gains
    assert "not for the channel" in gain.reason


def test_where_the_channel_is_what_is_waited_for() -> None:
    """Many devices behind one channel: half of its bytes are gradients."""
    gain = gain_on_cards(published_smartssds(40), dense(4), TOP_K)
    assert gain.gains
    assert gain.ratio == pytest.approx(8 / (4 + 0.04), rel=0.1)
    assert "times as fast" in gain.reason


def test_where_gradients_pass_through_the_ssds() -> None:
    """Their bytes are as many fewer for the SSD to write and to read."""
    assert gain_on_cards(published_smartssds(4), dense(), TOP_K, route=Route.STORAGE).gains


def test_choosing_can_cost_more_than_it_saves() -> None:
    """On many devices a slow choice on the CPU takes longer than sending everything."""
    free = gain_on_cards(published_smartssds(40), dense(4), TOP_K)
    slow = gain_on_cards(published_smartssds(40, select=3e-9), dense(4), TOP_K)
    assert free.gains
    assert slow.ratio < 1
    assert not slow.gains
