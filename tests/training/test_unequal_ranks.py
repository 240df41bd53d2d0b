"""If one of two ranks does something else, both raise and say where each of them is; lawful waits do not end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightning_smartinfinity.zero3.ranks.locations import CERTAIN, Place, describe, find_divergence
from tests.helpers.long_cases import long_but
from tests.helpers.processes import run_module
from tests.training.unequal_worker import Generated

WORKER = "tests.training.unequal_worker"
LONG = pytest.mark.long

# By situation: what the error says of rank 0 and of rank 1, as regular expressions.
DIVERGED = {
    "fewer batches": (r"in a .*, after step 2", r"in a .* in on_validation_start, .*, after step 2"),
    "forward at the end": ("ended its training", r"gather of 'net.0.weight'.*:\d+ \(<lambda>\)"),
    "read on one": ("training_epoch_loop.advance", r"in a gather in on_train_batch_end, .*\(<lambda>\), after"),
    "written on one": (r"in a gather in on_validation_end, .*\(<lambda>\)", "in a"),
    "busy": ("has waited for .* in a", r"has joined no collective for .*\(<lambda>\), after step 1"),
    "loop": (r"has joined no collective for .*\(loop\), after step 3", r"in a .*\(loop\), after step 3"),
}
USUAL = ("fewer batches", "forward at the end", "read on one", "written on one", "busy")


@pytest.mark.seam("cut_connections ends waits: gloo has no call", "Processes listen on ports of gloo's connections.")
@pytest.mark.parametrize("situation", long_but(USUAL, DIVERGED))
def test_ranks_that_cannot_meet(situation: str, tmp_path: Path) -> None:
    """Each rank that waits raises an error that names ranks, parameters, module, line and step; then it ends."""
    done = run_module(WORKER, tmp_path, situation, ranks=2)
    raised = set(re.findall(r"^\[rank(\d)\]: lightning_smartinfinity.errors.RanksDivergedError: ", done.stderr, re.M))
    assert raised == ({"1"} if situation in ("forward at the end", "loop") else {"0", "1"}), done.stderr
    told = re.search(r"RanksDivergedError: The ranks wait for each other at different places\..*", done.stderr)
    assert told, done.stderr
    for rank, words in enumerate(DIVERGED[situation]):
        of_rank = re.search(rf"Rank {rank} on .*?(?=\. Rank |\. Give every )", told[0])
        assert of_rank and re.search(words, of_rank[0]), told[0]


@LONG
def test_ranks_that_read_different_parameters(tmp_path: Path) -> None:
    """All ranks raise before any of them gathers, and the error names both lines."""
    done = run_module(WORKER, tmp_path, "read differently", ranks=2)
    line = r"\S+unequal_worker.py:\d+"
    told = rf"Rank 1 reads 'net.2.weight' at {line}, and rank 0 'net.0.weight' at {line}: all ranks"
    assert len(re.findall(rf"^\[rank\d\]: .*UnsupportedError: {told}", done.stderr, re.M)) == 2, done.stderr


def test_lawful_waits(tmp_path: Path) -> None:
    """A rank that is slow in each batch, or takes three times the limit in a save, is waited for."""
    done = run_module(WORKER, tmp_path, "slow", ranks=2)
    assert (done.returncode, done.stdout.count("done")) == (0, 2), done.stderr


def test_generated_texts_of_different_lengths(tmp_path: Path) -> None:
    """Each rank generates the tokens of a plain model in memory, as long as it asked for."""
    done = run_module(WORKER, tmp_path, "generated", ranks=2)
    assert done.returncode == 0, done.stderr
    plain = Generated()
    for rank in (0, 1):
        assert f"rank {rank}: {plain.generate(rank)}" in done.stdout


def place(doing: str, *, count: int = 7, seconds: float = 0.0, lawful: bool = False) -> Place:
    """Return a place of a rank that has begun this many collectives."""
    return Place(doing, lawful, {"0": count}, "gather" if doing == "waits" else "", "at a.py:1 (f)", seconds)


LIMIT = 10 * CERTAIN
SHORT, LONGER = CERTAIN + 1, LIMIT + 1


@pytest.mark.parametrize(
    ("places", "diverged"),
    [
        pytest.param([place("waits", seconds=LONGER)] * 2, False, id="a slow network"),
        pytest.param([place("works", seconds=LONGER)] * 2, False, id="all work"),
        pytest.param([place("waits", seconds=SHORT), place("waits", count=6, seconds=SHORT)], True, id="two places"),
        pytest.param(
            [place("waits", seconds=SHORT), place("waits", count=6, seconds=1)], False, id="one came just now"
        ),
        pytest.param([place("waits", seconds=SHORT), place("ended", seconds=SHORT)], True, id="one has ended"),
        pytest.param([place("ended", seconds=LONGER)] * 2, False, id="all have ended"),
        pytest.param([place("waits", seconds=LONGER), place("works", count=6, seconds=SHORT)], False, id="one works"),
        pytest.param([place("waits", seconds=LONGER), place("works", count=6, seconds=LONGER)], True, id="too long"),
        pytest.param(
            [place("waits", seconds=LONGER), place("works", count=6, seconds=LONGER, lawful=True)], False, id="saves"
        ),
        pytest.param([place("works", seconds=LONGER), place("works", count=6, seconds=LONGER)], True, id="CUDA waits"),
    ],
)
def test_the_verdict(places: list[Place], diverged: bool) -> None:
    """It is given soon where it is certain, after the limit where a rank may still come, and else never."""
    assert find_divergence(dict(enumerate(places)), LIMIT) is diverged


def test_many_ranks_at_one_place() -> None:
    """The message names places, not every rank: it fits into one message of the watch."""
    places = dict.fromkeys(range(1, 500), place("waits", seconds=40)) | {0: place("ended", seconds=35)}
    assert describe(places, ["node"] * 500, LIMIT) == (
        "The ranks wait for each other at different places. Rank 0 on node ended its training 35 s ago. Rank 1 on node "
        "and 498 more ranks has waited for 40 s in a gather at a.py:1 (f)."
    )
