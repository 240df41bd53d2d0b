"""A training on cards that is killed in a step or a save, and resumed, ends as if it had never stopped."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.runif import RunIf
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

pytestmark = RunIf(xrt=True)

SAVE_EVERY, NUM_STEPS = 4, 32


def fit(folder: Path, *, cards: bool = True, overlap: str = "forward", **settings: Any) -> int:
    """Train from the last checkpoint, if there is one, and return the exit status."""
    last = folder / "last.ckpt"
    run = StorageRun(
        out=str(folder),
        storage=[str(folder / "ssd0"), str(folder / "ssd1")],
        cards=cards,
        checkpoint=str(last) if last.exists() else "",
        epochs=NUM_STEPS,
        trainer={"limit_val_batches": 0, "max_steps": NUM_STEPS},
        options={"overlap": overlap},
        # An epoch is what lies between two saves, since Lightning begins a resumed epoch with its first batch.
        module={"width": 128, "length": 2 * SAVE_EVERY, "noise": False, "shuffle": False, "dropout": 0.0},
        **{"save_every": SAVE_EVERY, "transfer": {"keep": False}, **settings},
    )
    code, output = launch(run)
    assert code in (0, -signal.SIGKILL), output[-4000:]
    return code


def assert_same(folder: Path, straight: Path) -> None:
    """Assert equal losses and learning rates of all steps, and equal final state."""
    assert len(steps_of(folder)) == NUM_STEPS
    assert steps_of(folder) == steps_of(straight)
    assert end_of(folder)["state"] == end_of(straight)["state"]


def left_in(folder: Path) -> list[Path]:
    """Return the files of state."""
    return [path for name in ("ssd0", "ssd1") for path in (folder / name).rglob("*") if path.is_file()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, emulated_cards_of_process: Any) -> Path:
    """The folder of a training on the host without a stop."""
    folder = tmp_path_factory.mktemp("straight")
    assert fit(folder, cards=False, overlap="none") == 0
    return folder


def test_killed_in_a_step_and_in_a_save(tmp_path: Path, straight: Path) -> None:
    """A training that is killed late, in a save and then in a step, ends as on the host and leaves no state."""
    for moment, step, seconds in (("save", 20, 0.004), ("step", 30, 0.002)):
        killed = fit(tmp_path, kill_at=f"kill at {moment}", kill_step=step, kill_after=seconds)
        assert killed == -signal.SIGKILL
        assert left_in(tmp_path), "it was not killed while its state was on storage"
    assert fit(tmp_path) == 0
    assert_same(tmp_path, straight)
    assert not left_in(tmp_path)


def test_killed_on_the_host_and_resumed_from_storage_on_cards(tmp_path: Path, straight: Path) -> None:
    """Cards go on with the tasklets that the host has left, also where the settings name another size."""
    kept: dict[str, Any] = {"save_every": 0, "transfer": {"keep": "on-failure"}}
    assert fit(tmp_path, cards=False, kill_at="kill at batch end", kill_step=20, **kept) == -signal.SIGKILL
    kept["transfer"]["tasklet_bytes"] = 128 * 1024
    assert fit(tmp_path, resume=True, **kept) == 0
    assert_same(tmp_path, straight)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_moments(tmp_path: Path, straight: Path, seed: int) -> None:
    """A training that is killed up to three times, on lines that only the clock chooses, ends as on the host."""
    choose = random.Random(seed)
    overlap = choose.choice(("none", "forward", "backward"))
    for _ in range(choose.randint(1, 3)):
        moment, step = choose.choice(("step", "save")), choose.randrange(SAVE_EVERY, NUM_STEPS, SAVE_EVERY)
        step += choose.randrange(1, SAVE_EVERY) if moment == "step" else 0
        kill = {"kill_at": f"kill at {moment}", "kill_step": step, "kill_after": choose.uniform(0.001, 0.05)}
        if fit(tmp_path, overlap=overlap, **kill) == 0:
            break
    else:
        assert fit(tmp_path, overlap=overlap) == 0
    assert_same(tmp_path, straight)
