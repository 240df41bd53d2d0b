"""Offloaded parameters on two processes change no bit and compile nothing, and errors reach both ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import torch

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
SAVED = 2


def test_two_processes_train_to_the_same_bits_and_compile_nothing(tmp_path: Path) -> None:
    """Runs in bf16, fp16 and fp32 without a compiler change no bit, also after resuming each other's checkpoints."""
    runs = {}
    for precision, name in (
        *(("bf16-mixed", name) for name in ZERO),
        *(("32-true", name) for name in ("plain", "nvme")),
        *(("16-mixed", name) for name in ("plain", "partly")),
    ):
        runs[precision, name] = Run(
            out=str(tmp_path / precision / name),
            recipe=dataclasses.replace(RECIPE, precision=precision),
            devices=2,
            save_at=(SAVED,) if precision == "bf16-mixed" else (),
            transfer=SMALL_RING,
            options={"zero": ZERO[name]},
        )
    for name, saved_by in (("plain", "nvme"), ("nvme", "partly")):
        again = runs["bf16-mixed", name]
        checkpoint = Path(runs["bf16-mixed", saved_by].out) / f"step-{SAVED}.ckpt"
        runs["resumed", name] = dataclasses.replace(
            again, out=str(tmp_path / "resumed" / name), resume=str(checkpoint), save_at=()
        )
    cache = tmp_path / "extensions"
    cache.mkdir()
    tools = dict.fromkeys(("CC", "CXX", "CUDAHOSTCXX"), "/nonexistent")
    outcomes = dict(zip(runs, launch(*runs.values(), env={**tools, "TORCH_EXTENSIONS_DIR": str(cache)}), strict=True))
    assert not list(cache.iterdir())
    for (precision, name), outcome in outcomes.items():
        expected = outcomes["bf16-mixed" if precision == "resumed" else precision, "plain"]
        first = SAVED * RECIPE.accumulate if precision == "resumed" else 0
        assert outcome.losses == expected.losses[first:], (precision, name)
        assert outcome.masters.keys() == expected.masters.keys()
        for parameter, master in expected.masters.items():
            assert torch.equal(outcome.masters[parameter], master), (precision, name, parameter)


def test_a_read_that_fails_on_one_rank_raises_on_both(tmp_path: Path) -> None:
    """A read fails in the middle of forward. Neither rank waits for the other, and nothing is left on storage."""
    done = run_module("tests.training.offload_failure_worker", tmp_path, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0] == seen[1] == {"met": seen[0]["met"], "left": []}
    assert seen[0]["met"].startswith("StorageError: Parameters: reading ")
    assert "parameters-00001" in seen[0]["met"]
