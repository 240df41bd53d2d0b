"""Training over several storage folders, with tasklets that change folders, gives the bits of one folder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_smartinfinity.pipeline import handler
from tests.pipeline.wandering import Wandering
from tests.training.test_overlap import BF16, SMALL_RING, assert_same, result
from tests.training.worker import Run

# Active clipping makes speculative updates wrong, so that they are rolled back.
RECIPE = dataclasses.replace(BF16, groups=True, accumulate=2, clip=0.3, max_steps=4)
BUCKET = {"reduce_bucket_size": 4000}  # gradients leave during backward


class Counting(Wandering):
    """A balance that counts how often it was asked to move tasklets."""

    asked = 0

    def better(self, counts: Any) -> NDArray[np.int64]:
        Counting.asked += 1
        return super().better(counts)


def run_of(root: Path, folders: int, *, overlap: str = "none", durability: str = "step", **settings: Any) -> Run:
    return Run(
        out=str(root),
        recipe=RECIPE,
        storage=[str(root / f"disk{index}") for index in range(folders)],
        transfer={**SMALL_RING, "durability": durability},
        options={"overlap": overlap, "zero": BUCKET},
        **settings,
    )


@pytest.fixture(scope="module")
def one_folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return result(run_of(tmp_path_factory.mktemp("one"), 1))


@pytest.mark.parametrize(
    "settings",
    [
        {"folders": 2, "overlap": "backward", "delays": 1},
        pytest.param({"folders": 3, "overlap": "forward", "durability": "none", "delays": 2}, marks=pytest.mark.long),
        {"folders": 2, "save_at": (2,)},
    ],
    ids=["backward", "forward-none", "resumed"],
)
def test_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], one_folder: Any) -> None:
    """Overlap, rollbacks, durability="none" and resuming into other folders change no bit."""
    monkeypatch.setattr(handler, "Balance", Counting)
    before = Counting.asked
    assert_same(result(run_of(tmp_path / "several", **settings)), one_folder)
    assert Counting.asked >= before + RECIPE.max_steps
    if "save_at" in settings:
        resume = str(tmp_path / "several" / "step-2.ckpt")
        _, masters = result(run_of(tmp_path / "resumed", 3, resume=resume))
        assert all(torch.equal(master, one_folder[1][name]) for name, master in masters.items())
