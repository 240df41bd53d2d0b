"""Trainings on CUDA devices follow torch on the CPU, and no setting changes a bit of them.

The settings are when updates run, where gradients and parameters lie, and how late transfers end. Every run has a
process of its own, because DeepSpeed chooses CPU or CUDA once per process and other tests choose the CPU.
"""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import TopK
from lightning_smartinfinity.pipeline.gradients.device_selection import top_k_payload, with_residual
from tests.fabric import worker as fabric_worker
from tests.helpers import reference
from tests.helpers.assertions import assert_equal, differing
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.model_folder import make_model_folder
from tests.helpers.models import Recipe
from tests.helpers.processes import REPOSITORY
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT
from tests.huggingface.trained import BATCH, STEPS
from tests.training import worker as trainer_worker
from tests.training.storage_worker import StorageRun, end_of, steps_of
from tests.training.test_overlap import CASES
from tests.training.worker import Run, launch

pytestmark = RunIf(cuda_devices=1)

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
# Gradients leave during backward about one layer at a time, and a tasklet holds about two layers.
SMALL = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
BUCKET = {"reduce_bucket_size": 4000}
BUDGET = {"gradient_bytes": 192 << 10}
SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"overlap": "forward"},
    "backward": {"overlap": "backward"},
    "auto": {"overlap": "auto"},
    "gradients on storage": {"overlap": "none", "transfer": BUDGET},
    "gradients on storage, forward": {"overlap": "forward", "transfer": BUDGET},
    "gradients on storage, or given up within backward": {"overlap": "backward", "transfer": BUDGET},
    "large ring": {"overlap": "none", "transfer": {"tasklet_bytes": 256 * 1024, "num_buffers": 4}},
    "DRAM tier": {"overlap": "forward", "transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
}


def assert_near(losses: list[float], expected: list[float], precision: str) -> None:
    """Assert that losses differ by no more than two matrix libraries do, and in 16 bit two roundings."""
    tolerance = 2e-3 if precision == "32-true" else 5e-2
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=tolerance, rtol=0, msg=precision)


@pytest.mark.parametrize("worker", [trainer_worker, fabric_worker], ids=["Trainer", "Fabric"])
def test_every_precision_trains_like_torch(worker: Any, tmp_path: Path) -> None:
    """Losses follow plain torch's on the CPU, with accumulation, clipping and a parameter that a step does not use."""
    recipe = Recipe(groups=True, scheduler="step", clip=0.5, accumulate=2, skip_side_at=(1,))
    runs = []
    for precision in PRECISIONS:
        options = {"loss_scale": 2.0**10} if precision.startswith("16") else {}
        of_precision = dataclasses.replace(recipe, precision=precision)
        runs.append(worker.Run(out=str(tmp_path / precision), recipe=of_precision, accelerator="cuda", options=options))
    for run, outcome in zip(runs, worker.launch(*runs), strict=True):
        assert_near(outcome.losses, reference.train(run.recipe).losses, run.recipe.precision)


@RunIf(cuda_devices=2)
def test_two_gpus_split_the_state(tmp_path: Path) -> None:
    """Two ranks on two devices follow plain torch on the batches of both."""
    recipe = Recipe(precision="bf16-mixed", max_steps=4)
    (outcome,) = launch(Run(out=str(tmp_path), recipe=recipe, accelerator="cuda", devices=2))
    assert_near(outcome.losses, reference.train(recipe, world_size=2).losses, recipe.precision)


def test_a_resume_is_exact(tmp_path: Path) -> None:
    """A run resumed in a new process with another ring equals an uninterrupted one bit for bit."""
    recipe = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, max_steps=6)
    run = Run(out=str(tmp_path / "straight"), recipe=recipe, accelerator="cuda", deterministic=True, save_at=(3,))
    saved = str(tmp_path / "straight" / "step-3.ckpt")
    ring = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}
    (straight,) = launch(run)
    (resumed,) = launch(dataclasses.replace(run, out=str(tmp_path / "resumed"), resume=saved, transfer=ring))
    assert resumed.losses == straight.losses[3:]
    assert_equal(resumed.masters, straight.masters)


def run_of(out: Path, name: str, *, overlap: str, delays: int | None, transfer: dict[str, Any]) -> Run:
    recipe, options = CASES[name]
    return Run(
        out=str(out),
        recipe=dataclasses.replace(recipe, width=64, depth=2),
        accelerator="cuda",
        deterministic=True,
        delays=delays,
        transfer={**SMALL, **transfer},
        options={**options, "overlap": overlap, "zero": {**BUCKET, **options.get("zero", {})}},
    )


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name: str, tmp_path: Path) -> None:
    """Losses, masters, skipped steps, loss scale and step counts are those of a training without overlap."""
    runs = [run_of(tmp_path / "straight", name, overlap="none", delays=None, transfer={})]
    for seed, (setting, options) in enumerate(SETTINGS.items()):
        runs.append(run_of(tmp_path / setting, name, delays=seed, **{"transfer": {}, **options}))
    straight, *others = launch(*runs)
    assert straight.masters
    for setting, outcome in zip(SETTINGS, others, strict=True):
        # As text, NaNs are equal.
        assert repr((outcome.losses, outcome.extra)) == repr((straight.losses, straight.extra)), setting
        assert differing(outcome.masters, straight.masters) == [], setting


def test_updates_begin_within_backward(tmp_path: Path) -> None:
    """With parameters on the device every step of a plain loop keeps the update that began within its backward."""
    recipe = Recipe(precision="bf16-true", depth=4, width=256, max_steps=6, accumulate=2)
    run = Run(out=str(tmp_path), recipe=recipe, accelerator="cuda", transfer=SMALL, options={"overlap": "backward"})
    (outcome,) = launch(run, worker="tests.training.guesses_worker")
    assert outcome.extra["outputs"] == "CudaPartition"
    assert (outcome.extra["adopted"], outcome.extra["discarded"]) == (recipe.max_steps, 0)


# ---- gradients that are selected on the device


def values_of(numel: int, seed: int) -> torch.Tensor:
    """Return values with ties, zeros, subnormals, and numbers that no 16-bit type holds."""
    generator = torch.Generator().manual_seed(seed)
    special = torch.tensor([0.5, -0.5, 0.0, -0.0, 1e-40, 7e4, -3.4e38, math.inf])
    picked = special[torch.randint(len(special), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.3, picked, torch.randn(numel, generator=generator))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 65_537, 1_000_003])
@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.9, 1.0])
def test_payloads_are_those_of_the_host(numel: int, ratio: float, dtype: torch.dtype) -> None:
    values = values_of(numel, seed=numel)
    taken = torch.arange(numel) % 7 != 3
    expected = top_k_payload(values, ratio=ratio, value_dtype=dtype, taken=taken)
    assert torch.equal(top_k_payload(values.cuda(), ratio=ratio, value_dtype=dtype, taken=taken.cuda()).cpu(), expected)


@pytest.mark.parametrize("scale", [1.0, 1024.0, 3.0])
def test_what_was_not_sent_is_added_as_on_the_host(scale: float) -> None:
    """The device rounds after each operation, without fusing them."""
    gradient, residual = values_of(100_000, seed=1), values_of(100_000, seed=2).clamp(-1e30, 1e30)
    total = with_residual(gradient.cuda(), residual.cuda(), scale).cpu()
    assert torch.equal(total.view(torch.int32), with_residual(gradient, residual, scale).view(torch.int32))


@pytest.mark.parametrize("offload", [{}, {"offload_param": {"device": "cpu"}}])
def test_a_training_is_the_same_wherever_is_selected(offload: dict[str, Any], tmp_path: Path) -> None:
    """With exact=False the host selects, and it selects exactly among so few elements."""
    recipe = Recipe(precision="bf16-mixed", clip=0.5, accumulate=2, max_steps=4)
    by_device, by_host = (
        launch(
            Run(
                out=str(tmp_path / f"{exact}"),
                recipe=recipe,
                accelerator="cuda",
                deterministic=True,
                options={"compression": TopK(0.05, exact=exact), "zero": offload},
            )
        )[0]
        for exact in (True, False)
    )
    assert by_device.losses == by_host.losses
    assert_equal(by_device.masters, by_host.masters)


# ---- from storage, after a kill

ON_GPU: dict[str, Any] = {"trainer": {"accelerator": "cuda", "deterministic": True, "limit_val_batches": 0}}
KILLED: dict[str, dict[str, Any]] = {
    "forward": {"options": {"overlap": "forward"}},
    "parameters on storage": {
        "options": {"zero": {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}}
    },
    "int8": {"options": {"state_format": "int8", "overlap": "none"}},
    "gradients on storage": {"transfer": {"gradient_bytes": 256 << 10}},
}


def run(of: StorageRun) -> int:
    """Run in a new interpreter, as on a GPU no process may be forked; return the exit status."""
    config = Path(of.out) / "run.json"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(dataclasses.asdict(of)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.storage_worker", str(config)],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode in (0, -9), (done.stdout + done.stderr)[-6000:]
    return done.returncode


@pytest.mark.parametrize("name", KILLED)
def test_killed_and_resumed(name: str, tmp_path: Path) -> None:
    """Killed at a step, and saving beside the steps: each step and the end are those of a training that never died."""
    settings: dict[str, Any] = {**ON_GPU, **KILLED[name], "save_every": 4}
    straight = StorageRun(out=str(tmp_path / "straight"), storage=str(tmp_path / "a"), **settings)
    assert run(straight) == 0
    killed = StorageRun(
        out=str(tmp_path / "killed"), storage=str(tmp_path / "b"), kill_at="kill at step", kill_step=7, **settings
    )
    assert run(killed) == -9
    assert run(dataclasses.replace(killed, kill_at="", resume=True)) == 0
    assert steps_of(Path(killed.out)) == steps_of(Path(straight.out))
    assert end_of(Path(killed.out)) == end_of(Path(straight.out))


# ---- by transformers' Trainer


def train_on_gpus(model: Path, out: Path, *, gpus: str, precision: str) -> list[float]:
    """Train with the same batches on the GPUs of these numbers, or on the CPU, and return the losses."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.huggingface.gpu_worker", str(model), str(out), str(BATCH), precision],
        cwd=REPOSITORY,
        env={**fresh_environment(), "CUDA_VISIBLE_DEVICES": gpus},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


@pytest.mark.parametrize(("precision", "like"), [("fp32", "32-true"), ("bf16", "bf16-mixed")])
def test_one_gpu_trains_like_the_cpu(precision: str, like: str, tmp_path: Path) -> None:
    """Losses are those of a CPU in fp32, up to the differences between two matrix libraries, or between precisions."""
    model = make_model_folder(tmp_path / "model")
    losses = train_on_gpus(model, tmp_path / "gpu", gpus="0", precision=precision)
    expected = train_on_gpus(model, tmp_path / "cpu", gpus="", precision="fp32")
    assert len(losses) == STEPS
    assert_near(losses, expected, like)
