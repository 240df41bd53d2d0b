"""Rates are those of storage, however slowly forward and backward use it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ActivationOffload
from lightning_smartinfinity.activations.tuning import tuner
from lightning_smartinfinity.activations.tuning.choice import Choice, Profile
from tests.activations.models import drop_memory, everything, finish_writes, opened
from tests.helpers.native_testing import Throttle

ENTRIES = 6
# Of a tensor that is cut into four parts, which are transferred at once.
NBYTES_OF_PARTS = 16 << 20
RATE_OF_PARTS = 1e8
PAUSE = 3 * NBYTES_OF_PARTS / RATE_OF_PARTS


def test_rates_of_storage_that_has_little_to_do(tmp_path: Path) -> None:
    """Only the time of transfers counts: storage that waits for the next tensor is not slow."""
    with opened(tmp_path, everything(host_bytes=3 * NBYTES_OF_PARTS)) as offloaded:
        store = offloaded._store
        throttle = Throttle(store.files.tensors.core, store.files.tensors._files.files)
        throttle.bytes_per_second = RATE_OF_PARTS
        x = torch.ones(NBYTES_OF_PARTS // 4, requires_grad=True)
        y = x
        with offloaded.forward(x):
            for _ in range(2):  # which takes longer than storage needs for what is saved, forward and backward
                y = (y * 2).sin()
                y.register_hook(lambda _: time.sleep(PAUSE))
                time.sleep(PAUSE)
        drop_memory(offloaded)
        y.sum().backward()
        rates = store.update_rates()
        # The pauses would make it a quarter, and the mean of the parts' own rates 0.4 of it.
        assert 0.5 * RATE_OF_PARTS < rates.write < 1.05 * RATE_OF_PARTS
        assert 0.5 * RATE_OF_PARTS < rates.read < 1.05 * RATE_OF_PARTS


@pytest.mark.parametrize(
    ("slow_from", "expected"),
    [(0, [0, 0, 0, 0, 2, *5 * [0], 2, 5, 5]), (3, [0, 0, 5, 5, 0, 0, 2, *5 * [0], 2, 5, 5])],
)
def test_storage_that_was_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow_from: int, expected: list[int]
) -> None:
    """It is used again once it is fast, although nothing has been written for long, and nothing read.

    When backward waits, the rates are those of the last micro-batch, however fast storage was before.
    What has room in the pool is tried first. Backward waits for none of that, even if storage is still slow.
    """
    nbytes, rate = 16 << 10, 2e5
    nothing = {"offloaded_bytes": 0, "kept_bytes": 0, "seconds": 0.0, "stall_seconds": 0.0, "peak_bytes": 0}

    def all_but_one_or_none(profile: Profile, **_: Any) -> Choice:
        is_fast = min(profile.write_rate, profile.read_rate) > 2 * rate
        return Choice(num_offloaded=is_fast * (ENTRIES - 1), **nothing)

    monkeypatch.setattr(tuner, "choose", all_but_one_or_none)
    monkeypatch.setattr(tuner, "_PATIENCE", 3)
    offloaded = []
    with opened(tmp_path, ActivationOffload(min_bytes=1, host_bytes=2 * nbytes)) as activations:
        store = activations._store
        throttle = Throttle(store.files.tensors.core, store.files.tensors._files.files)
        x = torch.ones(nbytes // 4, requires_grad=True)
        for step in range(len(expected)):
            is_slow = slow_from <= step < slow_from + 6  # until it was tried again in vain
            throttle.bytes_per_second = rate if is_slow else 0
            with activations.forward(x):  # learns from the step before
                offloaded.append(activations._tuner.plan.offloaded_bytes // nbytes)
                y = x
                for _ in range(ENTRIES):
                    y = (y * 2).sin()
            (finish_writes if offloaded[-1] == 2 else drop_memory)(activations)
            y.sum().backward()
            assert activations._last is not None
            activations._last.waited_seconds = 1e3 * (is_slow and offloaded[-1] > 2)
    assert offloaded == expected
