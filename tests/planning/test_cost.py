"""Predictions of where compression brings a gain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lightning_smartinfinity import BlockScaled, ConfigError, TopK
from lightning_smartinfinity.planning.cost import (
    CompressionResources,
    gain_of,
    gain_on_cards,
    gain_on_host,
    published_smartssds,
)
from lightning_smartinfinity.planning.simulator.gradients import BlockScaledPayload, Dense, TopKPayload
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.workload import Workload

TOP_K = TopKPayload(0.01, 2)
EIGHT_BITS = BlockScaledPayload()


def dense(item_bytes: int = 2) -> Workload:
    return Workload(numel=1, gradients=Dense(item_bytes), parameter_bytes=item_bytes)


@pytest.mark.parametrize(
    ("settings", "gains"),
    [
        ({"num_cards": 0}, False),
        ({"num_cards": 4}, False),
        ({"num_cards": 20}, True),
        ({"num_cards": 4, "route": Route.STORAGE}, True),
    ],
)
def test_of_a_codec_on_published_cards(settings: dict[str, Any], gains: bool) -> None:
    """Compression gains with many cards on one channel, or with gradients that pass through the SSDs."""
    setting = CompressionResources(**({"num_cores": 32} | settings))
    assert gain_of(TopK(0.01, error_feedback=False), dense(4), setting).gains == gains


def test_gpus_choose_beside_the_cores() -> None:
    """GPUs select faster than few cores, but not for exact=False, which runs on the CPU."""
    on_cpu, on_gpu = (CompressionResources(num_cards=20, num_cores=1, num_gpus=num) for num in (0, 4))
    for exact in (True, False):
        codec = TopK(0.01, exact=exact)
        faster = gain_of(codec, dense(4), on_gpu).ratio > 1.1 * gain_of(codec, dense(4), on_cpu).ratio
        assert faster == exact


def test_gradients_take_time_on_their_way_to_a_gpu() -> None:
    """Gradients and residuals travel to the GPU, and the link of one GPU is slower than many cards."""
    ratios = [
        gain_of(
            TopK(0.01, error_feedback=feedback),
            dense(4),
            CompressionResources(num_cards=20, num_cores=64, num_gpus=num),
        ).ratio
        for feedback, num in ((True, 1), (False, 1), (False, 8))
    ]
    assert ratios[0] < ratios[1] < ratios[2]


def test_the_residual_takes_time() -> None:
    """Few threads take longer for the residual than the channel saves."""
    ratios = [
        gain_of(TopK(0.01), dense(4), CompressionResources(num_cards=20, num_cores=64, num_threads=threads)).ratio
        for threads in (1, 8, 64)
    ]
    without = gain_of(
        TopK(0.01, error_feedback=False), dense(4), CompressionResources(num_cards=20, num_cores=64)
    ).ratio
    assert ratios[0] < 1 < ratios[1] < ratios[2] < without


def test_choosing_more_takes_longer() -> None:
    """With few cores a step waits for the selection, so that selecting more takes longer."""
    setting = CompressionResources(num_cards=40, num_cores=2)
    few, many = (gain_of(TopK(ratio, error_feedback=False), dense(4), setting).ratio for ratio in (0.02, 0.021))
    assert few > 2 * many


def test_a_card_chooses_with_two_threads() -> None:
    """A card selects with two threads, and more cores do not help."""
    ratios = [
        gain_on_cards(published_smartssds(1, select=20e-9, cores=cores), dense(4), TOP_K).ratio for cores in (1, 2, 64)
    ]
    assert ratios[1] > 1.5 * ratios[0]
    assert ratios[2] == pytest.approx(ratios[1])


def test_everything_with_its_place() -> None:
    """A payload of all values with their positions is larger than the values."""
    gain = gain_of(TopK(1.0), dense(2), CompressionResources(num_cards=4, num_cores=64, route=Route.STORAGE))
    assert not gain.gains
    assert "Sending 200.0%" in gain.reason
    assert "no fewer bytes" in gain.reason


def test_values_of_another_type() -> None:
    """A smaller value type leaves more of the channel."""
    setting = CompressionResources(num_cards=40, num_cores=64, num_threads=64)
    narrow, wide = (gain_of(TopK(0.2, value_dtype=dtype), dense(4), setting).ratio for dtype in ("bf16", "auto"))
    assert narrow > wide > 1


@pytest.mark.parametrize(("item_bytes", "num_cards", "gains"), [(4, 4, False), (4, 40, True), (2, 40, True)])
def test_8_bits(item_bytes: int, num_cards: int, gains: bool) -> None:
    """8 bits gain where cards wait for their channel, by the bytes saved on it."""
    gain = gain_of(
        BlockScaled(error_feedback=False), dense(item_bytes), CompressionResources(num_cards=num_cards, num_cores=64)
    )
    assert gain.gains == gains
    assert f"Sending {1.004 / item_bytes:.1%} of the gradients' bytes" in gain.reason
    if gains:
        assert gain.ratio == pytest.approx(2 * item_bytes / (item_bytes + 1.004), rel=0.1)


def test_8_bits_are_made_on_the_cpu() -> None:
    """8-bit payloads always come from the CPU. With few cores that takes longer than the channel saves."""
    on_cpu, on_gpu = (CompressionResources(num_cards=40, num_cores=4, num_gpus=gpus) for gpus in (0, 2))
    gain = gain_of(BlockScaled(), dense(4), on_cpu)
    assert gain == gain_of(BlockScaled(), dense(4), on_gpu)
    assert gain.ratio < 1 and "takes longer than it saves" in gain.reason
    more = gain_of(BlockScaled(), dense(4), CompressionResources(num_cards=40, num_cores=64, num_threads=64))
    assert more.gains


def test_8_bits_take_the_kernel_no_longer() -> None:
    """Scaling codes does not depend on the rate of the sparse kernel, unlike scattered values."""
    machine = published_smartssds(1)
    slow = replace(machine, device=replace(machine.device, sparse_kernel=5e8))
    ratios = [[gain_on_cards(each, dense(4), form).ratio for each in (machine, slow)] for form in (EIGHT_BITS, TOP_K)]
    assert ratios[0][0] == ratios[0][1]
    assert ratios[1][0] > 2 * ratios[1][1]


def test_never_on_the_host() -> None:
    """The host never gains, since its gradients stay in host memory."""
    gain = gain_on_host()
    assert not gain.gains
    assert "host memory" in gain.reason


def test_not_where_the_ssds_are_what_is_waited_for() -> None:
    """A few devices with gradients from host memory do not wait for the channel."""
    gain = gain_on_cards(published_smartssds(4), dense(), TOP_K)
    assert not gain.gains
    assert "not for the channel" in gain.reason and "choosing" not in gain.reason


def test_compression_can_be_a_loss() -> None:
    """Compression makes a step longer where devices are the bottleneck, and the reason says so."""
    gain = gain_of(TopK(0.01), dense(2), CompressionResources(num_cards=4, num_cores=64))
    assert gain.ratio < 0.9
    assert "not for the channel, and then for selecting the elements to send and keeping the others." in gain.reason


def test_where_the_channel_is_what_is_waited_for() -> None:
    """Many devices behind one channel gain, since half of its bytes are gradients."""
    gain = gain_on_cards(published_smartssds(40), dense(4), TOP_K)
    assert gain.gains
    assert gain.ratio == pytest.approx(8 / (4 + 0.04), rel=0.1)
    assert "times as fast" in gain.reason


def test_where_gradients_pass_through_the_ssds() -> None:
    """Compression gains because the SSDs write and read fewer bytes of gradients."""
    assert gain_on_cards(published_smartssds(4), dense(), TOP_K, route=Route.STORAGE).gains


def test_choosing_can_cost_more_than_it_saves() -> None:
    """With many devices a slow selection on the CPU takes longer than sending everything."""
    free = gain_on_cards(published_smartssds(40), dense(4), TOP_K)
    slow = gain_on_cards(published_smartssds(40, select=3e-9), dense(4), TOP_K)
    assert free.gains
    assert slow.ratio < 1
    assert not slow.gains
    assert "takes longer than it saves" in slow.reason


@pytest.mark.parametrize("wrong", [{"num_cores": 0}, {"num_cards": -1}, {"num_threads": 0}, {"num_gpus": 1.5}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """Our own error names the wrong setting."""
    with pytest.raises(ConfigError, match=rf"CompressionResources\({next(iter(wrong))}=.*is out of range"):
        CompressionResources(**{"num_cards": 1, "num_cores": 1} | wrong)
