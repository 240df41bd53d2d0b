"""Trainings on an emulated CUDA device, in memory that the host cannot touch, give the bits of the host.

The device is that of device.cpp: torch's own CUDA code, Lightning's and DeepSpeed's CUDA accelerators and all of ours
run as on a GPU.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.emulated_cuda.build import build, environment, run_on_device
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.runif import RunIf
from tests.training import test_overlap_programs as programs
from tests.training.test_overlap import BF16, CASES, SMALL_RING, assert_same, result as result_on_host, run_of
from tests.training.worker import Outcome, Run, launch

pytestmark = RunIf(torch_without_cuda=True)

WORKER = "tests.emulated_cuda.worker"
OVERLAPS = ("forward", "backward")
SELECTED = dataclasses.replace(BF16, clip=0.5, accumulate=2)
SELECTION = {"compression": {"ratio": 0.05, "exact": True}}
PLAIN = [f"plain {precision}" for precision in ("bf16-true", "32-true")]
OTHERS: dict[str, tuple[Recipe, str, dict[str, Any]]] = {
    **{name: (dataclasses.replace(BF16, precision=name.split()[1], accumulate=2), "backward", {}) for name in PLAIN},
    "unpinned": (*CASES["cpu"][:1], "forward", {"zero": {"offload_param": {"device": "cpu", "pin_memory": False}}}),
    # Gradients go to storage, or are given up as they are used.
    "budget": (dataclasses.replace(BF16, precision="bf16-true", width=64, depth=2), "backward", {}),
    "selection": (SELECTED, "none", SELECTION),
    "selection offloaded": (SELECTED, "none", {**SELECTION, "zero": {"offload_param": {"device": "cpu"}}}),
}
"""Trainings beside the cases, each with its overlap on the device and its options."""
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
    for name, (recipe, overlap, options) in OTHERS.items():
        host[name] = run_of(root / "host" / name, recipe, "none", **options)
        device[name] = run_of(root / "device" / name, recipe, overlap, delays=None if name in PLAIN else 1, **options)
    device["budget"] = dataclasses.replace(device["budget"], transfer={**SMALL_RING, "gradient_bytes": 96 << 10})
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


@pytest.mark.parametrize(("name", "overlap"), long_but(USUAL, EVERY_OVERLAP))
def test_same_bits(name: str, overlap: str, trained: Trained) -> None:
    """Accumulation, clipping, skipped steps, validation, unused and offloaded parameters give the bits of the host."""
    assert_same_outcome(trained.device[f"{name} {overlap}"], trained.host[name])


def assert_same_outcome(device: Outcome, host: Outcome) -> None:
    """Assert that losses, figures and masters are equal; a write at a save may add one to the generation."""
    expected = {name: figure for name, figure in host.extra.items() if name != "generation"}
    figures = {name: device.extra[name] for name in expected}
    assert_same(((device.losses, figures), device.masters), ((host.losses, expected), host.masters))


@pytest.mark.parametrize("name", OTHERS)
def test_same_bits_of_gradients_elsewhere(name: str, trained: Trained) -> None:
    """So do updates that begin within backward, gradients on storage or given up, and a selection on the device.

    Every step of a plain loop keeps the update that began within its backward.
    """
    found = trained.device[name]
    assert_same_outcome(found, trained.host[name])
    if name in PLAIN:
        guesses = [found.extra[figure] for figure in ("outputs", "adopted", "discarded")]
        assert guesses == ["CudaPartition", BF16.max_steps, 0]


def test_the_device_computes_on_while_parameters_are_fetched(trained: Trained) -> None:
    """The host waits for copies on a stream of their own, not for the stream on which modules compute."""
    counts = [outcome.extra["counts"] for outcome in trained.device.values()]
    assert all(each["modules"] > 100 for each in counts)
    assert not any(each["waits"] for each in counts)


def test_gradients_arrive_beside_backward(trained: Trained) -> None:
    """They are copied on a stream of ours, and the step computes no sum of squares.

    The threads that add them have ended with each training. Little memory is pinned for them.
    """
    found = [outcome.extra for outcome in trained.device.values()]
    assert all(each["copies"]["ours"] > 10 for each in found)
    figures = [(each["copies"]["torch"], each["counts"]["sums in step"], each["threads"]) for each in found]
    assert figures == [(0, 0, [])] * len(found)
    assert {each["ring_bytes"] for each in found} == {4 << 20}


def test_frozen_parameters_alone_may_be_pageable(trained: Trained) -> None:
    """DeepSpeed pins trained parameters in host memory in any case, and frozen ones if it may."""
    pinned = [trained.device[name].extra["pinned"] for name in ("cpu forward", "unpinned")]
    assert pinned == [{"true": True, "false": True}, {"true": True, "false": False}]


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
def test_any_program_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trainings with random interference, as on the host: some updates are kept and some are rolled back."""
    # The first two programs of the host begin no update within backward.
    seeds = range(programs.FIRST_PROGRAM + 2, programs.FIRST_PROGRAM + programs.NUM_PROGRAMS)
    done = run_on_device("-m", WORKER, "train_programs", tmp_path, seeds.start, seeds.stop)
    assert done.returncode == 0, done.stderr[-6000:]
    right = wrong = 0
    for seed in seeds:
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
    done = run_on_device("-m", WORKER, "fail", runs, skipped)
    assert done.returncode == 1 and ("CudaError" in done.stderr or "CUDA error" in done.stderr), done.stderr[-6000:]
    (again, _, _), now = result_on_host(dataclasses.replace(run, resume="storage"))
    assert again == losses[-len(again) :]
    assert_same((None, now), (None, masters))
