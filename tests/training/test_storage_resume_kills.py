"""A fit that is killed again and again, at random moments, and always goes on from storage ends with the same bits."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
COMPRESSION = {"compression": {"ratio": 0.1}}
CASES: dict[str, dict[str, Any]] = {
    "step": {"options": {"overlap": "none"}, "trainer": {"val_check_interval": 3}},
    "forward": {"options": {"overlap": "forward", "state_format": "int8"}, "folders": 2, "spread_every": 2},
    "backward": {"options": {"overlap": "backward", "state_format": "bf16"}, "trainer": {"precision": "32-true"}},
    "remainder": {"options": {"overlap": "backward", "state_format": "int8_remainder"}, "module": {"plateau": True}},
    "two processes": {"options": {"overlap": "forward"}, "devices": 2, "folders": 2, "spread_every": 3},
    "two machines": {"options": {"overlap": "forward"}, "devices": 2, "machines": 2, "folders": 2, "spread_every": 3},
    "two processes, parameters on storage": {"options": {"overlap": "forward", "zero": NVME}, "devices": 2},
    "compressed": {"options": {**COMPRESSION, "overlap": "backward", "state_format": "int8"}},
    "two processes, compressed": {"options": {**COMPRESSION, "overlap": "none"}, "devices": 2, "folders": 2},
    "DRAM tier": {"options": {"overlap": "forward"}, "transfer": {"dram_cache_bytes": 100_000, "durability": "power"}},
    "loss scale": {
        "options": {"overlap": "backward"},
        "trainer": {"precision": "16-mixed"},
        "module": {"scale": 1000.0},
    },
    "clipping": {"options": {"overlap": "backward"}, "trainer": {"gradient_clip_val": 0.01}},
    "one script": {"checkpoint": "storage-or-new", "options": {"overlap": "forward"}},
    "SGD": {
        "options": {"overlap": "forward"},
        "module": {"optimizer": "SGD", "optimizer_settings": {"momentum": 0.9, "nesterov": True}},
    },
    "RMSprop": {
        "options": {"overlap": "none"},
        "module": {"optimizer": "RMSprop", "optimizer_settings": {"centered": True, "momentum": 0.5}},
    },
}
SHORT = {"forward": 3, "two machines": 1}
NUM_LONG = 25  # kills of each case: 350 in all
MOMENTS = (
    ("start", 0.0),
    ("start", 1.2),
    ("load", 0.0),
    ("load", 0.05),
    ("batch start", 0.03),
    ("step", 0.03),
    ("batch end", 0.03),
    ("save", 0.1),
    ("growth", 0.0),
    ("growth", 0.01),
)
"""Moments, and how many seconds later a kill comes at most; 0: at once."""
NUM_STEPS = 18  # of all processes together
TRIES = 4  # of a kill, which a fit that ends before it escapes


class Fits:
    """Fits of one case in a folder, each of which goes on from the one before."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.devices: int = settings.get("devices", 1)
        self.num_steps = NUM_STEPS // self.devices
        folders = [str(folder / "{node}" / f"storage{number}") for number in range(settings.pop("folders", 1))]
        settings["made_up"] = [*range(self.devices)] if settings.get("machines", 1) > 1 else []
        settings["transfer"] = {"keep": "on-failure", **settings.get("transfer", {})}
        settings["module"] = {"width": 128, **settings.get("module", {})}
        self.folder, self.settings = folder, {"storage": folders, "save_every": 4, **settings}

    def fit(self, *, resume: bool, ends: int | None = None, **moment: Any) -> tuple[int, str]:
        seed = 9 if resume and "checkpoint" not in self.settings else 1
        run = StorageRun(out=str(self.folder), resume=resume, seed=seed, **self.settings, **moment)
        return launch(run, ends=ends)

    def numbers(self) -> list[int]:
        """Return the numbers of the steps that rank 0 has written down, in their order."""
        path = self.folder / "steps-0.txt"
        return [int(line.split()[0]) for line in path.read_text().splitlines()] if path.exists() else []


def killed(fits: Fits, draw: random.Random, num_kills: int, deck: list[tuple[str, float]]) -> Iterator[bool]:
    """Fit until the end comes; yield after every fit whether it was killed before its last step.

    Moments come from a deck, which is filled again when none of it is left that may come.

    No fit is killed after this number of kills. A process that is killed after its last step may have left others that
    came to their end, and removed their state.
    """
    begun = False
    while True:
        before = fits.numbers()
        # Nothing grows in fits whose tasklets stay where they are, and the first one loads nothing.
        left_out = {"growth": "spread_every" not in fits.settings, "load": not begun}
        if not [when for when, _ in deck if not left_out.get(when)]:
            deck += draw.sample(MOMENTS, len(MOMENTS))
        when, latest = deck.pop(next(at for at, (when, _) in enumerate(deck) if not left_out.get(when)))
        step = min(fits.num_steps - 2, (before[-1] if before else 0) + draw.randrange(1, 5))
        step *= when not in ("start", "load")
        step -= step % {"save": 4, "growth": fits.settings.get("spread_every", 1)}.get(when, 1)
        kill: dict[str, Any] = {
            "kill_at": f"kill at {when}",
            "kill_step": step,
            "kill_rank": draw.randrange(fits.devices),
            "kill_after": draw.uniform(0.0, latest),
        }
        code, output = fits.fit(resume=begun, **(kill if num_kills else {}))
        nothing = "There is no" in output and not before  # killed before the first step was done
        assert code in (0, -signal.SIGKILL) or nothing, (when, step, begun, before, output[-4000:])
        numbers = fits.numbers()
        assert numbers == [] or numbers[0] == 1
        lost = [a - b + 1 for a, b in itertools.pairwise(numbers)]
        assert not lost or (max(lost) <= 1 and min(lost) >= 0), (when, step, numbers)
        begun = not nothing
        is_over = code == 0 or fits.num_steps in numbers
        was_killed = not is_over and code == -signal.SIGKILL
        num_kills -= was_killed
        yield was_killed
        if is_over:
            return


@pytest.mark.parametrize(
    ("name", "num_kills"),
    [
        *((name, num_kills) for name, num_kills in SHORT.items()),
        *(pytest.param(name, NUM_LONG, marks=pytest.mark.long) for name in CASES),
    ],
)
def test_kills_at_random(name: str, num_kills: int, tmp_path: Path, attack: Attack) -> None:
    """However often it is killed, a fit loses at most a step each time, and ends as one that was never killed.

    Two machines end as two processes of one.
    """
    attack(
        "kill at a random moment of a fit, then ckpt_path='storage'",
        tries=num_kills,
        outcome="resumed to the bit, at most one step lost",
    )
    straight = Fits(tmp_path / "straight", **{**CASES[name], "machines": 1})
    straight.fit(resume=False, ends=0)
    draw, chains, left, deck = random.Random(f"{name} {num_kills}"), 0, num_kills, list[tuple[str, float]]()
    while left > 0:
        chains += 1
        assert chains <= TRIES * num_kills, "too many fits escaped their kill"
        fits = Fits(tmp_path / f"killed{chains}", **CASES[name])
        left -= sum(killed(fits, draw, left, deck))
        for rank in range(fits.devices):
            steps, expected = steps_of(fits.folder, rank), steps_of(straight.folder, rank)
            assert list(steps.items()) == list(expected.items())[: len(steps)]
            assert len(steps) >= fits.num_steps - 1 and len(expected) == fits.num_steps
            if (fits.folder / f"end-{rank}.json").exists():
                assert end_of(fits.folder, rank) == end_of(straight.folder, rank)
