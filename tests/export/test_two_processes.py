"""Two processes save what one would save, and raise together; memory is taken for a few windows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.cli.main import main
from tests.export.models import LitModel, files_of
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY, run_module
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import PROCESS_LIMIT


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train and save on two processes."""
    folder = tmp_path_factory.mktemp("two")
    done = run_module("tests.export.worker", "two", folder, ranks=2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(("live", "options"), [("live", ()), ("live32", ("--dtype", "fp32"))])
def test_two_processes_save_what_is_exported_of_their_checkpoint(
    live: str, options: tuple[str, ...], out: Path, tmp_path: Path
) -> None:
    """All files have the same bytes, whether two processes write them or one reads their checkpoint."""
    assert main(["export", str(out / "ckpt"), str(tmp_path / "out"), *options]) == 0
    assert files_of(out / live) == files_of(tmp_path / "out")


def test_lightning_takes_a_file_of_two_processes(out: Path, tmp_path: Path) -> None:
    """Slices of both processes are joined."""
    from safetensors.torch import load_file

    assert main(["export", str(out / "ckpt"), str(tmp_path / "lit.ckpt"), "--to", "lightning"]) == 0
    params = LitModel.load_from_checkpoint(tmp_path / "lit.ckpt").inner.model.state_dict()
    masters = load_file(out / "live32" / "model.safetensors")
    assert all(torch.equal(params[name], value) for name, value in masters.items())


def test_a_model_that_is_only_evaluated_is_saved(out: Path, tmp_path: Path) -> None:
    """On one process and on two, loaded weights give the files of the training."""
    trainer: Any = quiet_trainer(tmp_path)
    trainer.validate(LitModel("gpt2"), ckpt_path=out / "ckpt")
    trainer.strategy.save_pretrained(tmp_path / "loaded")
    assert files_of(tmp_path / "loaded") == files_of(out / "live")
    assert files_of(out / "loaded") == files_of(out / "live")


def test_every_process_raises_if_one_cannot_write(out: Path) -> None:
    """Both ranks have the error of the first; what existed stays, and a failed save leaves nothing."""
    first, second = (torch.load(out / f"errors-{rank}.pt") for rank in range(2))
    assert first == second
    assert "is no folder" in first[0] and "The third write failed" in first[1]
    assert not (out / "failed").exists()
    assert not list(out.glob(".saving*"))


DEPTH = 16  # 67 million parameters: 134 MB in bf16, 268 MB of masters
BOUND = 120_000_000


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "tests.export.worker",
        "memory",
        str(tmp_path_factory.mktemp("memory")),
        str(DEPTH),
    ]
    environment = fresh_environment() | {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=PROCESS_LIMIT
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.split("FIGURES ")[1].splitlines()[0])
    return result


@pytest.mark.parametrize("what", ["live", "live_masters", "safetensors", "lightning"])
def test_an_export_passes_through_windows(what: str, figures: dict[str, Any]) -> None:
    """Peak memory grows by less than the weights have bytes."""
    assert 2 * figures["parameters"] > BOUND
    assert figures[what] < BOUND, figures
