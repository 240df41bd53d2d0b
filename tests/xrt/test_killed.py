"""A training on cards that is killed in a step or a save, and resumed, ends as if it had never stopped."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.xrt.fits import same_arrays
from tests.xrt.killed_worker import RECIPE, SAVE_EVERY

pytestmark = RunIf(xrt=True)

SIGKILL = -9


def run(folder: Path, device: str, overlap: str, when: str) -> int:
    """Run a training until it ends or is killed, and return its exit status."""
    folder.mkdir(exist_ok=True)
    done = run_module("tests.xrt.killed_worker", folder, device, overlap, when)
    assert done.returncode in (0, SIGKILL), done.stderr[-4000:]
    return done.returncode


def assert_same(folder: Path, straight: Path) -> None:
    """Assert equal losses since the resume, and equal arrays of every parameter."""
    found, expected = (torch.load(each / "end.pt", weights_only=True) for each in (folder, straight))
    assert 0 < len(found["losses"]) <= len(expected["losses"])
    assert found["losses"] == expected["losses"][-len(found["losses"]) :]
    assert same_arrays(found["arrays"], expected["arrays"])


def left_in(folder: Path) -> list[Any]:
    """Return the files of state."""
    return [path for name in ("ssd0", "ssd1") for path in (folder / name).rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, emulated_cards_of_process: Any) -> Path:
    """The folder of a training on the host without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    assert run(folder, "host", "none", "never") == 0
    return folder


def test_killed_in_a_step_and_in_a_save(tmp_path: Path, straight: Path) -> None:
    """A training that is killed late, in a save and then in a step, ends as on the host and leaves no state."""
    for when in ("save:20:0.004", "step:30:0.002"):
        assert run(tmp_path, "smartssd", "forward", when) == SIGKILL
        assert left_in(tmp_path), "it was not killed while its state was on storage"
    assert run(tmp_path, "smartssd", "forward", "never") == 0
    assert_same(tmp_path, straight)
    assert not left_in(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_moments(tmp_path: Path, straight: Path, seed: int) -> None:
    """A training that is killed up to three times, on lines that only the clock chooses, ends as on the host."""
    choose = random.Random(seed)
    overlap = choose.choice(("none", "forward", "backward"))
    for _ in range(choose.randint(1, 3)):
        step = choose.randrange(SAVE_EVERY, RECIPE.max_steps, SAVE_EVERY)
        if choose.random() < 0.5:
            step += choose.randrange(1, SAVE_EVERY)
            when = f"step:{step}:{choose.random() / 20:.4f}"
        else:
            when = f"save:{step}:{choose.random() / 20:.4f}"
        if run(tmp_path, "smartssd", overlap, when) == 0:
            break
    else:
        assert run(tmp_path, "smartssd", overlap, "never") == 0
    assert_same(tmp_path, straight)
