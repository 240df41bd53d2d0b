"""Trainings whose parameters and gradients lie on an emulated CUDA device give the bits of the host."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CudaError
from lightning_smartinfinity.transfer import handler as handler_module
from lightning_smartinfinity.transfer.partitions import CudaPartition
from lightning_smartinfinity.zero3.step import overlap_choice
from lightning_smartinfinity.zero3.step.gradient_path import GradientPath
from tests.helpers.long_cases import long_but
from tests.native.cuda_fixture import fake_cuda
from tests.native.fake_cuda import FakeCuda
from tests.training import test_overlap_programs as programs
from tests.training.emulated_device import EmulatedDevice
from tests.training.test_overlap import BF16, CASES, SMALL_RING, assert_same, result
from tests.training.test_overlap_backward import run_of
from tests.training.worker import train
from tests.transfer.wandering import Wandering

__all__ = ["fake_cuda"]

OVERLAPS = ("none", "forward", "backward")


@pytest.fixture
def device(fake_cuda: FakeCuda) -> Iterator[EmulatedDevice]:
    device = EmulatedDevice(fake_cuda, seed=1)
    yield device
    device.close()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("name", long_but(["32-true", "bf16-mixed", "nvme", "cpu"], CASES))
def test_same_bits(
    name: str, overlap: str, device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accumulation, clipping, skipped steps, validation and unused parameters give the bits of the host."""
    recipe, options = CASES[name]
    straight = result(run_of(tmp_path / "host", recipe, "none", **options))
    device.install(monkeypatch, offloads=name in ("cpu", "nvme"))
    assert_same(result(run_of(tmp_path / "device", recipe, overlap, delays=1, **options)), straight)


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_updates_begin_within_backward(
    precision: str, device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of a plain loop keeps the update that began within its backward, on the device."""
    device.install(monkeypatch)
    recipe = dataclasses.replace(BF16, precision=precision, accumulate=2)
    _, trainer, _ = train(run_of(tmp_path, recipe, "backward"))
    optimizer: Any = trainer.strategy.optimizers[0]
    assert isinstance(optimizer._outputs(), CudaPartition)
    assert (optimizer.speculation.num_adopted, optimizer.speculation.num_discarded) == (BF16.max_steps, 0)
    assert any("cuMemcpyHtoDAsync_v2" in call for call in device.fake.calls())
    trainer.strategy.close()  # type: ignore[attr-defined]


def test_a_checkpoint_in_the_middle(device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run on the device resumes from one of the host, and the host from the device's, to the same bits."""
    recipe, options = CASES["bf16-mixed"]
    host = dataclasses.replace(run_of(tmp_path / "host", recipe, "none", **options), save_at=(2,))
    (losses, _, _), masters = result(host)

    def resumed(folder: str, of: str) -> None:
        run = run_of(tmp_path / folder, recipe, "backward", delays=1, **options)
        resume = str(tmp_path / of / "step-2.ckpt")
        (again, _, _), now = result(dataclasses.replace(run, resume=resume, save_at=(2, 4)))
        assert again == losses[-len(again) :]
        assert all(torch.equal(now[name], masters[name]) for name in masters)

    with monkeypatch.context() as patch:
        device.install(patch)
        result(dataclasses.replace(run_of(tmp_path / "device", recipe, "backward", delays=1, **options), save_at=(2,)))
        resumed("device again", "host")
    resumed("host again", "device")


def test_a_budget_of_gradients(device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that go to storage, or are given up as they are used, come from a device, too."""
    recipe = dataclasses.replace(BF16, precision="bf16-true", width=64, depth=2)
    straight = result(run_of(tmp_path / "host", recipe, "none"))
    device.install(monkeypatch)
    run = run_of(tmp_path / "device", recipe, "backward", delays=1)
    run = dataclasses.replace(run, transfer={**SMALL_RING, "gradient_bytes": 96 << 10})
    assert_same(result(run), straight)


def test_any_program_gives_the_same_bits(fake_cuda: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random trainings with random interference, as on the host: some updates are kept and some are rolled back."""
    monkeypatch.setattr(overlap_choice, "_WARM_UP", 0)
    monkeypatch.setattr(overlap_choice, "_MEASURED", 1)
    monkeypatch.setattr(handler_module, "Balance", Wandering)
    right = wrong = 0
    for seed in range(programs.FIRST_PROGRAM, programs.FIRST_PROGRAM + programs.NUM_PROGRAMS):
        drawn = programs.program(seed)
        with monkeypatch.context() as patch:
            patch.setattr(GradientPath, "bypasses_buckets", drawn.bypasses_buckets)
            straight = programs.train(programs.straight_of(drawn), tmp_path / f"{seed} straight")
            device = EmulatedDevice(fake_cuda, seed=seed)
            device.install(patch, offloads="offload_param" in drawn.zero)
            left = programs.train(drawn, tmp_path / f"{seed}", programs.Faulty(seed=seed))
            device.close()
        programs.assert_same(left, straight)
        right, wrong = right + left.guesses[0], wrong + left.guesses[1]
    assert right > 1 and wrong > 1


@pytest.mark.parametrize("skipped", long_but([24, 40], range(24, 72, 8)))
def test_a_device_that_fails(
    skipped: int, device: EmulatedDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training ends by the driver's error, and another one goes on from its state on storage to the same bits."""
    recipe = dataclasses.replace(BF16, max_steps=6)
    (losses, _, _), masters = result(run_of(tmp_path / "straight", recipe, "none"))
    with monkeypatch.context() as patch:
        device.install(patch)
        device.fake.fail_copy(skipped=skipped)
        with pytest.raises(CudaError):
            train(run_of(tmp_path / "failed", recipe, "backward"))
        gc.collect()
        device.fake.reset()
    run = run_of(tmp_path / "failed", recipe, "backward")
    (again, _, _), now = result(dataclasses.replace(run, resume="storage"))
    assert again == losses[-len(again) :]
    assert all(torch.equal(now[name], masters[name]) for name in masters)
