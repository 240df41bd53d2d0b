"""The warning that compression brings no gain on SmartSSDs uses the prediction for all cards of the machine."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import TopK, TransferConfig
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import feed_back_threads
from lightning_smartinfinity.planning import cost
from lightning_smartinfinity.planning.automatic_strategy import warn_of_no_gain
from lightning_smartinfinity.zero3.settings import OffloadSettings
from tests.helpers.card_runs import setup_of

QUICK = TopK(0.01, error_feedback=False)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process be rank 0 on a machine with 64 cores."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def reasons(
    codec: TopK, cards: int, *, num_processes: int = 1, sharers: int = 1, on_gpu: bool = False, **settings: Any
) -> list[str]:
    """Return the warnings with fp32 gradients."""
    setup = setup_of(cards, Path("none.xclbin"), sharers=sharers, **settings)
    offload = OffloadSettings(
        storage=(Path("none"),), transfer=TransferConfig(), compression=codec, smartssd=setup.settings, cards=setup
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_no_gain(offload, num_arrays=3, num_processes=num_processes, on_gpu=on_gpu)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("codec", "cards", "settings", "told"),
    [
        (QUICK, 4, {"gradient_route": "storage"}, ()),  # gradients pass through the SSDs
        (QUICK, 14, {}, ()),  # enough cards share the channel
        (QUICK, 4, {}, ("predicted to bring no gain", "to 4 device(s)", "not the channel")),
        (TopK(0.01), 14, {}, ("takes longer than it saves",)),  # one thread takes too long for the residual
        (QUICK, 2, {"num_processes": 7}, ()),  # the cards of all processes count
        (QUICK, 2, {"num_processes": 7, "sharers": 7}, ("to 2 device(s)",)),  # and each of them once
    ],
)
def test_warned_where_it_does_not_gain(
    codec: TopK, cards: int, settings: dict[str, Any], told: tuple[str, ...]
) -> None:
    """The warning names the reason."""
    warned = reasons(codec, cards, **settings)
    assert len(warned) == bool(told)
    assert all(text in warned[0] for text in told)


@pytest.mark.parametrize(("compute", "processes", "threads"), [(1, 1, 8), (1, 4, 2), (1, 100, 1), (12, 1, 12)])
def test_all_cores_feed_the_residual(compute: int, processes: int, threads: int) -> None:
    """The residual uses at most eight cores of a machine, and never fewer threads than the update."""
    assert feed_back_threads(compute, processes) == threads


def test_choosing_on_the_gpu_takes_no_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """Selection on the GPU brings a gain even where a CPU core would be too slow."""
    monkeypatch.setattr(cost, "_TOP_K", replace(cost._TOP_K, compress={False: 1e-7, True: 1e-7}))
    (slow,) = reasons(QUICK, 14)
    assert "takes longer than it saves" in slow
    assert reasons(QUICK, 14, on_gpu=True) == []
