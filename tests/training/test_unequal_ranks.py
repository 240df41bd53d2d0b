"""If ranks do different things, each reports its place; how ranks meet, and what SIGTERM does to a wait and a save."""

from __future__ import annotations

import platform
import re
import signal
import socket
import weakref
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from lightning_smartinfinity import RankLostError
from lightning_smartinfinity.integrations.trainer.shutdown import abandon_soon_after_sigterm
from lightning_smartinfinity.native import ask_to_end, ending_seconds
from lightning_smartinfinity.zero3.ranks import watchdog as watching
from lightning_smartinfinity.zero3.ranks.locations import CERTAIN, RankPosition, describe, find_divergence
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT
from tests.training.unequal_worker import Generated

WORKER = "tests.training.unequal_worker"

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


@pytest.mark.long
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


def place(doing: str, *, count: int = 7, seconds: float = 0.0, lawful: bool = False) -> RankPosition:
    """Return a place of a rank that has begun this many collectives."""
    return RankPosition(doing, lawful, {"0": count}, "gather" if doing == "waits" else "", "at a.py:1 (f)", seconds)


COLLECTIVE = 10 * CERTAIN
SHORT, LONGER = CERTAIN + 1, COLLECTIVE + 1


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
def test_the_verdict(places: list[RankPosition], diverged: bool) -> None:
    """It is given soon where it is certain, after the limit where a rank may still come, and else never."""
    assert find_divergence(dict(enumerate(places)), COLLECTIVE) is diverged


def test_many_ranks_at_one_place() -> None:
    """The message names places, not every rank: it fits into one message of the watch."""
    places = dict.fromkeys(range(1, 500), place("waits", seconds=40)) | {0: place("ended", seconds=35)}
    assert describe(places, ["node"] * 500, COLLECTIVE) == (
        "The ranks wait for each other at different places. Rank 0 on node ended its training 35 s ago. Rank 1 on node "
        "and 498 more ranks has waited for 40 s in a gather at a.py:1 (f)."
    )


# ---- how the ranks meet before they watch each other, and what SIGTERM does


def test_a_rank_that_cannot_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 meets the others all the same, so none of them waits, and all train without a watch."""
    gather = Mock(side_effect=lambda value: [value, value if isinstance(value, tuple) else ""])
    monkeypatch.setattr(watching.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watching, "_gather", gather)
    monkeypatch.setattr(watching, "_listen", Mock(side_effect=OSError("too many open files")))
    with pytest.warns(UserWarning, match=r"rank 0 cannot listen: too many open files.* timeout=timedelta"):
        assert watching._meet(1.0, None) is None
    assert gather.call_count == 2


def test_a_machine_that_does_not_come() -> None:
    """The error of those that have waited for it names their machine, and how long ranks wait."""
    with (
        pytest.raises(RankLostError, match=f"from {platform.node()}: .*1/2 clients joined.*30 minutes, or .* timeout="),
        watching.awaiting_ranks(),
    ):
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True, timeout=timedelta(seconds=1))


def test_who_does_not_know_the_token_is_sent_away() -> None:
    """Rank 0 takes no connection of a stranger for a rank's, even if it comes first and names one."""
    token, rank = b"t" * 16, (1).to_bytes(4, "big")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hellos = (b"x" * 16 + rank, b"t" * 15 + b"x" + rank, token + rank)
    callers = [watching._connect("127.0.0.1", port, hello=hello) for hello in hellos]
    (connected,) = watching._accept(listener, 1, token).values()
    connected.sendall(b"welcome")
    for caller, heard in zip(callers, (b"", b"", b"welcome"), strict=True):
        caller.settimeout(LIMIT)
        assert caller.recv(7) == heard
        caller.close()
    connected.close()


def test_the_end_of_an_earlier_training_leaves_the_watch_of_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy that is closed late does not end the watch that another one has begun since."""
    native, group = Mock(), Mock()
    native.report.return_value.lost = native.report.return_value.diverged = None
    monkeypatch.setattr(watching.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(watching.dist, "group", Mock(WORLD=group))
    monkeypatch.setattr(watching, "_watch", watching._Watch(native, ["a", "b"], weakref.ref(group), (7.0, None)))
    earlier, later = watching.begin_watch(7.0, None), watching.begin_watch(7.0, None)
    watching.end_watch(earlier)
    native.end_training.assert_not_called()
    watching.end_watch(later)
    native.end_training.assert_called_once()


def test_a_checkpoint_after_sigterm(tmp_path: Path) -> None:
    """Storage that answers has its whole limit again, so a busy disk does not lose the last checkpoint."""
    trainer = quiet_trainer(tmp_path)
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed")))
    ask_to_end()
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert ending_seconds() is None


@pytest.mark.parametrize("is_ignored", [False, True])
def test_sigterm_in_a_fit(is_ignored: bool) -> None:
    """Waits for a disk become short before the handler runs that was there, which may wait for one itself.

    A process that ignores SIGTERM goes on to ignore it.
    """
    heard: list[float | None] = []
    signal.signal(signal.SIGTERM, signal.SIG_IGN if is_ignored else lambda *_: heard.append(ending_seconds()))
    abandon_soon_after_sigterm()
    assert ending_seconds() is None
    signal.raise_signal(signal.SIGTERM)
    assert heard == ([] if is_ignored else [3.0]) and (ending_seconds() is None) == is_ignored
