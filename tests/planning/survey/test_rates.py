"""Rates that are measured on this machine, and what it has."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.errors import ConfigError, StorageError
from lightning_smartinfinity.planning.pace import assumed_rates, pace
from lightning_smartinfinity.planning.survey import rates
from lightning_smartinfinity.planning.survey.models import find_source, survey_model
from lightning_smartinfinity.planning.survey.rates import measure_drive, measure_rates, require_device
from lightning_smartinfinity.planning.survey.resources import survey_resources
from lightning_smartinfinity.planning.training import Training
from lightning_smartinfinity.storage.jobs.jobs import Job, find_jobs
from tests.helpers.model_folder import llama_config

TRAINING = Training(seq=16)


@pytest.fixture
def small_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure the drive with little."""
    measure = partial(measure_drive, numel=100_000)
    monkeypatch.setattr("lightning_smartinfinity.planning.survey.rates.measure_drive", measure)


def test_measuring_leaves_only_figures(tmp_path: Path, small_drive: None) -> None:
    """All rates but a GPU's and a network's are measured, a plan's step is one figure, and the folder is as before."""
    config = llama_config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=2, vocab_size=64
    )
    config.save_pretrained(tmp_path / "model")
    source = find_source(str(tmp_path / "model"))
    model = survey_model(source, batch=1, seq=16)
    storage = tmp_path / "storage"
    rates = assumed_rates(on_gpu=False, cores=2)
    measured = measure_rates(source, model, TRAINING, rates, storage=storage, device="cpu")
    assert {name for name, of in vars(measured).items() if not of.measured} == {"to_gpu", "network"}
    assert min(of.low for of in vars(measured).values()) > 0
    assert list(storage.iterdir()) == []
    found = pace(model, TRAINING, measured, on_gpu=False)
    assert found is not None and found.step.measured and found.step.low == pytest.approx(found.step.high)
    assert config.num_hidden_layers == 5


def test_a_measurement_that_was_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A killed measurement leaves a job, which can be listed and removed."""
    left: list[Job] = []
    monkeypatch.setattr(rates, "_measured", lambda *_: left.extend(find_jobs(tmp_path)))
    measure_drive(tmp_path, numel=100_000)
    (job,) = left
    assert job.name.startswith("measure-") and job.in_use


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """The remedy names the option, and a drive without room is no crash."""
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="--storage"):
        measure_drive(tmp_path / "file" / "below", numel=100_000)


def test_a_gpu_that_is_not_here_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of another machine cannot be measured on this one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert require_device("cpu") == "cpu"
    with pytest.raises(ConfigError, match="Leave out --measure"):
        require_device("cuda")


def test_what_this_machine_has(tmp_path: Path) -> None:
    """The disk is that of the nearest folder that exists; memory is what the kernel says is available."""
    found = survey_resources(tmp_path / "not" / "yet")
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal"))
    assert 0 < found.host_memory <= total
    assert 0 < found.disk <= found.drive_bytes
    assert found.cores >= 1
    assert found.on_gpu == (torch.cuda.device_count() > 0)
