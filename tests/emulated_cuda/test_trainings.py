"""Trainings on an emulated CUDA device, in memory that the host cannot touch, give the bits of the host.

The device is that of device.cpp: torch's own CUDA code, Lightning's and DeepSpeed's CUDA accelerators and all of ours
run as on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_cuda.build import build, environment
from tests.helpers.long_cases import long_but
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT
from tests.native.builds import ROOT
from tests.training import test_overlap_programs as programs
from tests.training.test_overlap import BF16, CASES, SMALL_RING, assert_same
from tests.training.test_overlap import result as result_on_host
from tests.training.test_overlap_backward import run_of
from tests.training.worker import Outcome, Run, launch

pytestmark = RunIf(torch_without_cuda=True)

OVERLAPS = ("forward", "backward")  # the selections below are without overlap
PLAIN = {
    precision: dataclasses.replace(BF16, precision=precision, accumulate=2) for precision in ("bf16-true", "32-true")
}
BUDGET = dataclasses.replace(BF16, precision="bf16-true", width=64, depth=2)
SELECTION = {"compression": {"ratio": 0.05, "exact": True}}
OFFLOADS: dict[str, dict[str, Any]] = {"": {}, " offloaded": {"zero": {"offload_param": {"device": "cpu"}}}}
RESUMED = "bf16-mixed"
EVERY_OVERLAP = [(name, overlap) for name in CASES for overlap in OVERLAPS]
# Each case runs with one kind of overlap, the resumed one within backward; the other pairs take long.
USUAL = [(name, "backward" if name == RESUMED else OVERLAPS[index % 2]) for index, name in enumerate(CASES)]


@dataclass(frozen=True)
class Trained:
    """The trainings of this module, by name."""

    root: Path
    host: dict[str, Outcome]
    device: dict[str, Outcome]


def cases(root: Path, overlapped: list[tuple[str, str]]) -> tuple[dict[str, Run], dict[str, Run]]:
    """Return the runs on the host and those on the device, of which a name begins with that of its host's.

    Args:
        root: Folder for all of them.
        overlapped: Names and overlaps of the cases that run on the device.
    """
    host, device = {}, {}
    for name, (recipe, options) in CASES.items():
        host[name] = run_of(root / "host" / name, recipe, "none", **options)
    for name, overlap in overlapped:
        recipe, options = CASES[name]
        device[f"{name} {overlap}"] = run_of(root / "device" / name / overlap, recipe, overlap, delays=1, **options)
    for name, recipe in PLAIN.items():
        host[f"plain {name}"] = run_of(root / "host" / f"plain {name}", recipe, "none")
        device[f"plain {name}"] = run_of(root / "device" / f"plain {name}", recipe, "backward")
    host["budget"] = run_of(root / "host" / "budget", BUDGET, "none")
    within = run_of(root / "device" / "budget", BUDGET, "backward", delays=1)
    device["budget"] = dataclasses.replace(within, transfer={**SMALL_RING, "gradient_bytes": 96 << 10})
    recipe = dataclasses.replace(BF16, clip=0.5, accumulate=2)
    for offload, options in OFFLOADS.items():
        name = f"selection{offload}"
        host[name] = run_of(root / "host" / name, recipe, "none", **SELECTION, **options)
        device[name] = run_of(root / "device" / name, recipe, "none", delays=1, **SELECTION, **options)
    host[RESUMED] = dataclasses.replace(host[RESUMED], save_at=(2,))
    name = f"{RESUMED} backward"
    device[name] = dataclasses.replace(device[name], save_at=(2,))
    resume = str(root / "host" / RESUMED / "step-2.ckpt")
    device["resumed"] = dataclasses.replace(device[name], out=str(root / "device" / "resumed"), resume=resume)
    return host, {name: dataclasses.replace(run, accelerator="cuda") for name, run in device.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Trained:
    """All trainings, without --long the usual ones; those on the device are in one process."""
    root = tmp_path_factory.mktemp("trainings")
    host, device = cases(root, EVERY_OVERLAP if pytestconfig.getoption("long") else USUAL)
    by_host = launch(*host.values())
    by_device = launch(*device.values(), env=environment(build()), worker="tests.training.guesses_worker")
    return Trained(root, dict(zip(host, by_host, strict=True)), dict(zip(device, by_device, strict=True)))


def result(outcome: Outcome) -> tuple[Any, Any]:
    figures = {
        name: figure
        for name, figure in outcome.extra.items()
        if name not in ("outputs", "adopted", "binding", "discarded")
    }
    return (outcome.losses, figures), outcome.masters


@pytest.mark.parametrize(("name", "overlap"), long_but(USUAL, EVERY_OVERLAP))
def test_same_bits(name: str, overlap: str, trained: Trained) -> None:
    """Accumulation, clipping, skipped steps, validation, unused and offloaded parameters give the bits of the host."""
    assert_same(result(trained.device[f"{name} {overlap}"]), result(trained.host[name]))


@pytest.mark.parametrize("name", [f"plain {precision}" for precision in PLAIN])
def test_updates_begin_within_backward(name: str, trained: Trained) -> None:
    """Every step of a plain loop keeps the update that began within its backward, on the device."""
    ours = trained.device[name]
    assert_same(result(ours), result(trained.host[name]))
    assert (ours.extra["outputs"], ours.extra["adopted"], ours.extra["discarded"]) == (
        "CudaPartition",
        BF16.max_steps,
        0,
    )


def test_a_budget_of_gradients(trained: Trained) -> None:
    """Gradients that go to storage, or are given up as they are used, come from a device, too."""
    assert_same(result(trained.device["budget"]), result(trained.host["budget"]))


@pytest.mark.parametrize("offload", OFFLOADS)
def test_selection_on_the_device(offload: str, trained: Trained) -> None:
    """The device selects the gradients that the host selects."""
    assert_same(result(trained.device[f"selection{offload}"]), result(trained.host[f"selection{offload}"]))


def test_a_checkpoint_in_the_middle(trained: Trained) -> None:
    """A run on the device resumes from one of the host, and the host from the device's, to the same bits."""
    straight = trained.host[RESUMED]
    recipe, options = CASES[RESUMED]
    run = run_of(trained.root / "host again", recipe, "backward", **options)
    saved = str(trained.root / "device" / RESUMED / "backward" / "step-2.ckpt")
    (host_again,) = launch(dataclasses.replace(run, resume=saved))
    for resumed in (trained.device["resumed"], host_again):
        assert resumed.losses == straight.losses[-len(resumed.losses) :]
        assert_same((None, resumed.masters), (None, straight.masters))


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    """Two ranks with a device each give the bits of two on the host."""
    recipe, options = CASES[RESUMED]
    host = dataclasses.replace(run_of(tmp_path / "host", recipe, "none", **options), devices=2)
    within = run_of(tmp_path / "device", recipe, "backward", delays=1, **options)
    (straight,) = launch(host)
    device = dataclasses.replace(within, devices=2, accelerator="cuda")
    (outcome,) = launch(device, env=environment(build()), worker="tests.training.guesses_worker")
    assert_same(result(outcome), result(straight))


def run_worker(name: str, *arguments: str | Path, seed: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a worker of this folder in a process that has the device."""
    return subprocess.run(
        [sys.executable, "-m", f"tests.emulated_cuda.{name}", *map(str, arguments)],
        cwd=ROOT,
        env=environment(build(), seed=seed),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )


def test_any_program_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trainings with random interference, as on the host: some updates are kept and some are rolled back."""
    done = run_worker("programs_worker", tmp_path, str(programs.FIRST_PROGRAM), str(programs.NUM_PROGRAMS))
    assert done.returncode == 0, done.stderr[-6000:]
    right = wrong = 0
    for seed in range(programs.FIRST_PROGRAM, programs.FIRST_PROGRAM + programs.NUM_PROGRAMS):
        drawn = programs.program(seed)
        with monkeypatch.context() as patch:
            patch.setattr(programs.GradientPath, "bypasses_buckets", drawn.bypasses_buckets)
            straight = programs.train(programs.straight_of(drawn), tmp_path / f"{seed} straight")
        left = programs.Left(**torch.load(tmp_path / f"{seed}.pt"))
        programs.assert_same(left, straight)
        right, wrong = right + left.guesses[0], wrong + left.guesses[1]
    assert right > 1 and wrong > 1


@pytest.mark.parametrize("skipped", long_but([40], range(24, 72, 8)))
def test_a_device_that_fails(skipped: int, tmp_path: Path) -> None:
    """The process ends by the error, and a training on the host goes on from its state on storage to the same bits."""
    recipe = dataclasses.replace(BF16, max_steps=6)
    (losses, _, _), masters = result_on_host(run_of(tmp_path / "straight", recipe, "none"))
    run = run_of(tmp_path / "failed", recipe, "backward")
    runs = tmp_path / "runs.json"
    runs.write_text(json.dumps([dataclasses.asdict(dataclasses.replace(run, accelerator="cuda"))]))
    done = run_worker("failing_worker", runs, str(skipped))
    assert done.returncode == 1 and ("CudaError" in done.stderr or "CUDA error" in done.stderr), done.stderr[-6000:]
    (again, _, _), now = result_on_host(dataclasses.replace(run, resume="storage"))
    assert again == losses[-len(again) :]
    assert_same((None, now), (None, masters))
