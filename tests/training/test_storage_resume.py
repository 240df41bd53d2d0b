"""An interrupted fit resumes from its state on storage as if it had never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

KEEP = {"keep": "on-failure"}


def run(folder: Path, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own."""
    settings["transfer"] = {**KEEP, **settings.get("transfer", {})}
    return launch(StorageRun(out=str(folder), storage=str(folder / "storage"), **settings))


@pytest.mark.parametrize(
    ("how", "step", "settings"),
    [
        ("kill at batch end", 8, {"options": {"overlap": "none"}, "trainer": {"val_check_interval": 3}}),
        ("kill at validation", 6, {"options": {"overlap": "forward"}, "trainer": {"val_check_interval": 3}}),
        ("kill at step", 9, {"options": {"overlap": "backward"}, "trainer": {"precision": "32-true"}}),
        ("kill at batch start", 8, {"trainer": {"limit_train_batches": 4}}),
        ("error at epoch end", 12, {"options": {"state_format": "int8"}, "module": {"plateau": True}}),
        ("interrupt at batch start", 7, {"transfer": {"durability": "power"}}),
        ("term at batch end", 3, {"trainer": {"accumulate_grad_batches": 2}}),
        ("kill at batch start", 5, {"devices": 2, "options": {"overlap": "forward"}}),
    ],
)
def test_every_interruption(how: str, step: int, settings: dict[str, Any], tmp_path: Path, attack: Attack) -> None:
    """Losses, schedulers, callbacks, buffers and random numbers are to the bit those of a fit that never stopped."""
    attack("kill, error or signal in a fit, then ckpt_path='storage'", tries=1, outcome="resumed to the bit")
    assert run(tmp_path / "straight", **settings)[0] == 0
    last = settings.get("devices", 1) - 1
    code, output = run(tmp_path / "broken", kill_at=how, kill_step=step, kill_rank=last, **settings)
    assert not (tmp_path / "broken" / "end-0.json").exists(), output[-2000:]
    code, output = run(tmp_path / "broken", resume=True, seed=9, **settings)
    assert code == 0, output[-4000:]
    for rank in range(settings.get("devices", 1)):
        assert steps_of(tmp_path / "broken", rank) == steps_of(tmp_path / "straight", rank)
        assert end_of(tmp_path / "broken", rank) == end_of(tmp_path / "straight", rank)
    assert not (tmp_path / "broken" / "storage").exists() or not list((tmp_path / "broken" / "storage").iterdir())


def test_nothing_to_resume(tmp_path: Path) -> None:
    """Without a training on storage the error says so, and nothing is left."""
    code, output = run(tmp_path / "none", resume=True)
    assert code != 0 and "There is no optimizer state in" in output
    code, output = run(tmp_path / "none", resume=True, transfer={"keep": False})
    assert code != 0 and "keep" in output and "ConfigError" in output


def test_a_new_fit_sets_a_resumable_one_aside(tmp_path: Path) -> None:
    """A fit that does not resume moves the store to another job, which can be resumed."""
    folder = tmp_path / "run"
    assert run(tmp_path / "straight")[0] == 0
    assert run(folder, kill_at="kill at batch end", kill_step=5)[0] != 0
    code, output = run(folder, kill_at="kill at batch end", kill_step=2)
    assert code != 0 and "default.aside" in output and "after step 4" in output
    code, output = run(folder, resume=True, transfer={"job": "default.aside"})
    assert code == 0, output[-3000:]
    assert end_of(folder) == end_of(tmp_path / "straight")


def test_another_model_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    """A store of another model is refused by name, and can still be resumed."""
    folder = tmp_path / "run"
    assert run(tmp_path / "straight")[0] == 0
    assert run(folder, kill_at="kill at batch end", kill_step=5)[0] != 0
    code, output = run(folder, resume=True, module={"width": 32})
    assert code != 0 and "its model was" in output, output[-3000:]
    assert run(folder, resume=True)[0] == 0
    assert end_of(folder) == end_of(tmp_path / "straight")
