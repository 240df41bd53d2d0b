"""Each phase of a training that may take long shows how far it has come."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.common import progress
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.transformers_worker import BuiltOnTokens, construct


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show every bar at once, and every change of it."""
    monkeypatch.setattr(progress, "DELAY", 1e-9)
    monkeypatch.setattr(progress, "_LINES_APART", 0.0)


def bars(said: str) -> dict[str, str]:
    """Return the last state of each bar by its name, as ``done/total``."""
    found = re.findall(r"([A-Z][a-z ]+): +100%\|[^|]*\| ([\d.]+[kM]?/[\d.]+[kM]?) ", said)
    return dict(found)


def test_a_short_fit_shows_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is printed by phases shorter than the delay, here more than a busy machine may take."""
    assert progress.DELAY == 10.0
    monkeypatch.setattr(progress, "DELAY", 3600.0)
    fit(LitTiny(Recipe()), tmp_path).save_checkpoint(tmp_path / "a.ckpt")
    assert "/s]" not in capsys.readouterr().err


@pytest.mark.usefixtures("impatient")
def test_phases_of_a_training_end_at_their_totals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Set-up, saving, resuming and evaluating name themselves; the bytes done are the total in the end."""
    trainer = fit(LitTiny(Recipe(frozen=True)), tmp_path)
    said = bars(capsys.readouterr().err)
    assert {"Partitioning the model", "Writing the first optimizer state"} == said.keys()
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    said |= bars(capsys.readouterr().err)
    assert {"Saving the model", "Saving the optimizer state"} < said.keys()
    quiet_trainer(tmp_path, max_steps=4).fit(LitTiny(Recipe(frozen=True)), ckpt_path=tmp_path / "a.ckpt")
    said |= bars(capsys.readouterr().err)
    assert "Loading the optimizer state" in said
    quiet_trainer(tmp_path).validate(LitTiny(Recipe(frozen=True)), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    said |= bars(capsys.readouterr().err)
    assert "Loading the weights" in said
    assert all(done == total for done, total in (state.split("/") for state in said.values())), said
    numel = sum(param.numel() for param in LitTiny(Recipe()).parameters())
    assert said["Partitioning the model"].endswith(f"{2 * numel / 1000:.1f}k")


@pytest.mark.usefixtures("impatient")
def test_a_model_built_in_configure_model_and_a_file_of_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Building shows the bytes built so far, since nobody knows the total; a file of weights shows both."""
    fit(BuiltOnTokens(lambda: construct("gpt2")), tmp_path)
    assert re.search(r"Building the model: [\d.]+kB \[", capsys.readouterr().err)
    torch.save(
        {"state_dict": LitTiny(Recipe()).state_dict(), "pytorch-lightning_version": "2.6.0"}, tmp_path / "w.ckpt"
    )
    strategy = SmartInfinityStrategy(tmp_path / "full", load_full_weights=True)
    quiet_trainer(tmp_path, strategy).validate(LitTiny(Recipe()), ckpt_path=tmp_path / "w.ckpt", verbose=False)
    done, total = bars(capsys.readouterr().err)["Loading the weights"].split("/")
    assert done == total


@pytest.mark.usefixtures("impatient")
def test_other_ranks_show_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 prints."""
    from lightning_smartinfinity.zero3.ranks.collectives import show_on_rank_zero

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    with show_on_rank_zero("Writing", 10) as advance:
        advance(10)
    assert capsys.readouterr().err == ""
