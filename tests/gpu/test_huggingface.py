"""Trainings by ``transformers.Trainer`` on GPUs, each in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.fresh_python import fresh_environment
from tests.helpers.model_folder import make_model_folder
from tests.helpers.processes import REPOSITORY
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT
from tests.huggingface.trained import BATCH, STEPS, weights_in


def train_on_gpus(model: Path, out: Path, *, gpus: int, precision: str) -> list[float]:
    """Train with the same batches on any number of GPUs, or on the CPU, and return the losses of the first rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={gpus}"] if gpus > 1 else []
    worker = ["-m", "tests.huggingface.gpu_worker", str(model), str(out), str(BATCH // max(gpus, 1)), precision]
    done = subprocess.run(
        [sys.executable, *launcher, *worker],
        cwd=REPOSITORY,
        env={**fresh_environment(), "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))},
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


@RunIf(cuda_devices=1)
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-3), ("bf16", 5e-2)])
def test_one_gpu_trains_like_the_cpu(precision: str, tolerance: float, tmp_path: Path) -> None:
    """Losses are those of a CPU in fp32, up to the differences between two matrix libraries, or between precisions."""
    model = make_model_folder(tmp_path / "model")
    losses = train_on_gpus(model, tmp_path / "gpu", gpus=1, precision=precision)
    expected = train_on_gpus(model, tmp_path / "cpu", gpus=0, precision="fp32")
    assert len(losses) == STEPS
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), atol=tolerance, rtol=0)


@RunIf(cuda_devices=2)
def test_two_gpus_train_like_one(tmp_path: Path) -> None:
    """Each takes half of every batch, and the weights are those of one GPU, up to rounding."""
    model = make_model_folder(tmp_path / "model")
    for gpus in (1, 2):
        train_on_gpus(model, tmp_path / str(gpus), gpus=gpus, precision="fp32")
    one, two = (weights_in(tmp_path / str(gpus) / "saved") for gpus in (1, 2))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=2e-3, rtol=0, msg=name)
