"""Offloaded parameters on two processes change no bit and compile nothing, and errors reach both ranks."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.processes import run_module
from tests.training.test_offloaded_parameters import NVME, SMALL_RING
from tests.training.worker import Run, launch

RECIPE = Recipe(width=64, groups=True, frozen=True, odd=True, accumulate=2, max_steps=3)
ZERO = {
    "plain": {},
    "cpu": {"offload_param": {"device": "cpu"}},
    "nvme": {**NVME, "sub_group_size": 30_000},
    "partly": {**NVME, "sub_group_size": 9000, "offload_param": {"device": "nvme", "max_in_cpu": 20_000}},
}
RUNS = [
    ("bf16-mixed", ("plain", "partly")),
    ("bf16-mixed", tuple(ZERO)),
    ("32-true", ("plain", "nvme")),
    ("16-mixed", ("plain", "partly")),
]
SAVED = 2


@pytest.mark.parametrize(("precision", "names"), long_but(RUNS[:1], RUNS))
def test_two_processes_train_to_the_same_bits_and_compile_nothing(
    precision: str, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Runs without a compiler change no bit, in bf16 also after resuming each other's checkpoints."""
    resumes = precision == "bf16-mixed"
    runs = {
        name: Run(
            out=str(tmp_path / name),
            recipe=dataclasses.replace(RECIPE, precision=precision),
            devices=2,
            save_at=(SAVED,) if resumes else (),
            transfer=SMALL_RING,
            options={"zero": ZERO[name]},
        )
        for name in names
    }
    for name, saved_by in itertools.pairwise(name for name in names if name != "cpu") if resumes else ():
        checkpoint = str(Path(runs[saved_by].out) / f"step-{SAVED}.ckpt")
        out = str(tmp_path / f"resumed {name}")
        runs[f"resumed {name}"] = dataclasses.replace(runs[name], out=out, resume=checkpoint, save_at=())
    cache = tmp_path / "extensions"
    cache.mkdir()
    tools = dict.fromkeys(("CC", "CXX", "CUDAHOSTCXX"), "/nonexistent")
    outcomes = dict(zip(runs, launch(*runs.values(), env={**tools, "TORCH_EXTENSIONS_DIR": str(cache)}), strict=True))
    assert not list(cache.iterdir())
    expected = outcomes["plain"]
    for name, outcome in outcomes.items():
        first = SAVED * RECIPE.accumulate if name.startswith("resumed") else 0
        assert outcome.losses == expected.losses[first:], name
        assert outcome.masters.keys() == expected.masters.keys()
        for parameter, master in expected.masters.items():
            assert torch.equal(outcome.masters[parameter], master), (name, parameter)


def test_a_read_that_fails_on_one_rank_raises_on_both(tmp_path: Path) -> None:
    """A read fails in the middle of forward. Neither rank waits for the other, and nothing is left on storage."""
    done = run_module("tests.training.offload_failure_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1] == {"met": seen[0]["met"], "left": []}
    assert seen[0]["met"].startswith("StorageError: Parameters: reading ")
    assert "unnamed file" in seen[0]["met"]
