"""Predictions of where compression brings a gain."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from lightning_smartinfinity import BlockScaled, ConfigError, TopK
from lightning_smartinfinity.planning.cost import (
    CompressionGain,
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
UNKEPT = partial(TopK, error_feedback=False)


def dense(item_bytes: int = 2) -> Workload:
    return Workload(numel=1, gradients=Dense(item_bytes), parameter_bytes=item_bytes)


def gain(codec: Any, item_bytes: int = 4, **resources: Any) -> CompressionGain:
    """Return the gain of a codec on cards beside 64 cores."""
    return gain_of(codec, dense(item_bytes), CompressionResources(**{"num_cores": 64} | resources))


@pytest.mark.parametrize(
    ("found", "gains", "reason"),
    [
        # Many cards on one channel gain, and gradients that pass through the SSDs.
        (lambda: gain(UNKEPT(0.01), num_cards=0), False, ""),
        (lambda: gain(UNKEPT(0.01), num_cards=4), False, "not the channel"),
        (lambda: gain(UNKEPT(0.01), num_cards=20), True, "times as fast"),
        (lambda: gain(UNKEPT(0.01), num_cards=4, route=Route.STORAGE), True, ""),
        (lambda: gain_on_cards(published_smartssds(4), dense(), TOP_K, route=Route.STORAGE), True, ""),
        # The host's gradients stay in host memory.
        (gain_on_host, False, "host memory"),
        # A payload of all values with their positions is larger than the values.
        (lambda: gain(TopK(1.0), 2, num_cards=4, route=Route.STORAGE), False, "Sending 200.0%"),
        (lambda: gain(TopK(1.0), 2, num_cards=4, route=Route.STORAGE), False, "no fewer bytes"),
        # Compression makes a step longer where devices are the bottleneck.
        (
            lambda: gain(TopK(0.01), 2, num_cards=4),
            False,
            "not the channel. Selecting the elements to send and keeping the others takes additional time.",
        ),
        # A slow selection on the CPU takes longer than sending everything; 8 bits always come from the CPU.
        (
            lambda: gain_on_cards(published_smartssds(40, select=3e-9), dense(4), TOP_K),
            False,
            "takes longer than it saves",
        ),
        (lambda: gain(BlockScaled(), num_cards=40, num_cores=4), False, "takes longer than it saves"),
        (lambda: gain(BlockScaled(), num_cards=40, num_threads=64), True, ""),
        (lambda: gain(BlockScaled(error_feedback=False), num_cards=4), False, "Sending 25.1% of the gradients' bytes"),
        (
            lambda: gain(BlockScaled(error_feedback=False), 2, num_cards=40),
            True,
            "Sending 50.2%",
        ),
    ],
)
def test_where_compression_gains(found: Any, gains: bool, reason: str) -> None:
    """The prediction says whether there is a gain, and why."""
    assert found().gains == gains
    assert reason in found().reason


@pytest.mark.parametrize(
    ("found", "ratio"),
    [
        # Half of the bytes on the channel are gradients.
        (lambda: gain_on_cards(published_smartssds(40), dense(4), TOP_K), 8 / (4 + 0.04)),
        (lambda: gain(BlockScaled(error_feedback=False), 4, num_cards=40), 8 / (4 + 1.004)),
        (lambda: gain(BlockScaled(error_feedback=False), 2, num_cards=40), 4 / (2 + 1.004)),
    ],
)
def test_how_much_is_gained(found: Any, ratio: float) -> None:
    """Where cards wait for their channel, the gain is that of the bytes saved on it."""
    assert found().ratio == pytest.approx(ratio, rel=0.1)


@pytest.mark.parametrize(
    ("slower", "faster", "times"),
    [
        # GPUs select faster than few cores.
        ((TopK(0.01), {"num_cores": 1}), (TopK(0.01), {"num_cores": 1, "num_gpus": 4}), 1.1),
        # Gradients and residuals travel to the GPU, and the link of one GPU is slower than many cards.
        ((TopK(0.01), {"num_gpus": 1}), (UNKEPT(0.01), {"num_gpus": 1}), 1),
        ((UNKEPT(0.01), {"num_gpus": 1}), (UNKEPT(0.01), {"num_gpus": 8}), 1),
        # Few threads take long for the residual.
        ((TopK(0.01), {"num_threads": 1}), (TopK(0.01), {"num_threads": 8}), 1),
        ((TopK(0.01), {"num_threads": 8}), (TopK(0.01), {"num_threads": 64}), 1),
        ((TopK(0.01), {"num_threads": 64}), (UNKEPT(0.01), {}), 1),
        # With few cores a step waits for the selection, so that selecting more takes longer.
        ((UNKEPT(0.021), {"num_cards": 40, "num_cores": 2}), (UNKEPT(0.02), {"num_cards": 40, "num_cores": 2}), 2),
        # A smaller type of values leaves more of the channel.
        (
            (TopK(0.2), {"num_cards": 40, "num_threads": 64}),
            (TopK(0.2, value_dtype="bf16"), {"num_cards": 40, "num_threads": 64}),
            1,
        ),
    ],
)
def test_what_is_faster(slower: tuple[Any, dict[str, Any]], faster: tuple[Any, dict[str, Any]], times: float) -> None:
    """One prediction is higher than another by more than a factor."""
    few, many = (gain(codec, **{"num_cards": 20} | resources).ratio for codec, resources in (slower, faster))
    assert many > times * few


def test_what_makes_no_difference() -> None:
    """A card selects with two threads; on a GPU is no gain for 8 bits or a sample; 8 bits need no sparse kernel."""
    cores = [gain_on_cards(published_smartssds(1, select=20e-9, cores=n), dense(4), TOP_K).ratio for n in (1, 2, 64)]
    assert cores[1] > 1.5 * cores[0] and cores[2] == pytest.approx(cores[1])
    for codec in (BlockScaled(), TopK(0.01, exact=False)):
        on_cpu, on_gpu = (gain(codec, num_cards=20, num_cores=1, num_gpus=gpus) for gpus in (0, 4))
        assert on_cpu == on_gpu
    machine = published_smartssds(1)
    slow = replace(machine, device=replace(machine.device, sparse_kernel=5e8))
    for form, factor in ((EIGHT_BITS, 1), (TOP_K, 2)):
        usual, slower = (gain_on_cards(each, dense(4), form).ratio for each in (machine, slow))
        assert usual == slower if factor == 1 else usual > factor * slower


@pytest.mark.parametrize("wrong", [{"num_cores": 0}, {"num_cards": -1}, {"num_threads": 0}, {"num_gpus": 1.5}])
def test_settings_are_checked(wrong: dict[str, Any]) -> None:
    """Our own error names the wrong setting."""
    with pytest.raises(ConfigError, match=rf"CompressionResources\({next(iter(wrong))}=.*is out of range"):
        CompressionResources(**{"num_cards": 1, "num_cores": 1} | wrong)
