"""When a rank is killed, stops, fails or is asked to end, every rank ends and says which one it was, and why.

Each rank is made up as a machine of its own, but where the test says something else.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.integrations.trainer import shutdown
from lightning_smartinfinity.integrations.trainer.shutdown import SavesAfterError
from lightning_smartinfinity.native import RANK_LOST_STATUS
from tests.helpers import fuse
from tests.helpers.attacks import Attack
from tests.helpers.processes import Client, environments_of
from tests.helpers.runif import RunIf
from tests.helpers.waiting import PROCESS_LIMIT, await_that, lenient
from tests.training.lost_rank_worker import IO_TIMEOUT, SILENCE

LONG = pytest.mark.long
NAME = "rank 1 on node1"


class Ranks(ExitStack):
    """Ranks that train or evaluate in forked processes, each of which has its own status and output.

    Args:
        folder: Folder of the test.
        cause: What happens to rank 1.
        doing: What they do.
        count: How many they are.
        machines: Whether each is on a machine ``node<rank>`` of its own.
    """

    def __init__(self, folder: Path, cause: str, doing: str = "fit", count: int = 2, machines: bool = True) -> None:
        super().__init__()
        self.folder, self.cause, self.doing, self.count, self.machines = folder, cause, doing, count, machines
        arguments = [str(folder), cause, doing, str(count), *(["--machines", "--made-up"] if machines else [])]
        pool, self._statuses = self.enter_context(ThreadPoolExecutor(count)), list[Future[int]]()
        for rank, environment in enumerate(self.enter_context(environments_of(count))):
            (output := folder / f"output-{rank}").touch()
            client = Client()
            self.callback(client.kill)
            job = {"module": "tests.training.lost_rank_worker", "arguments": arguments, "environments": [environment]}
            self._statuses.append(pool.submit(client.run, {**job, "stdout": str(output), "stderr": str(output)}))

    def send(self, signum: int, *ranks: int) -> None:
        """Send a signal to some ranks once all are in their fourth batch."""
        working = [self.folder / f"at-work-{rank}" for rank in range(self.count)]

        def work_or_ended() -> bool:
            begun = [file.exists() and file.read_text() != "" for file in working]
            return all(at_work or status.done() for at_work, status in zip(begun, self._statuses, strict=True))

        await_that(work_or_ended, seconds=PROCESS_LIMIT, told=lambda: f"{self.said(0)}\n{self.said(1)}")
        for rank in ranks:
            os.kill(int(working[rank].read_text()), signum)

    def status(self, rank: int) -> int:
        """Wait until a rank ends, and return its exit status."""
        return self._statuses[rank].result()

    def said(self, rank: int) -> str:
        """Return what a rank has written."""
        return (self.folder / f"output-{rank}").read_text()

    def seconds_since_work(self) -> float:
        """Return how long ago rank 1 began its fourth batch."""
        return time.time() - (self.folder / "at-work-1").stat().st_mtime


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks to which the parameter of the test happens while they do what it says, or train."""
    with Ranks(tmp_path, *request.param) as started:
        yield started


KILLED = {
    "fit": ("killed",),
    "of the same machine": ("killed", "fit", 2, False),
    **{doing: ("killed", doing) for doing in ("validate", "test", "predict", "fabric")},
    "of three": ("killed", "fit", 3),
    "of three, validate": ("killed", "validate", 3),
}


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(how, id=name, marks=[] if name == "fit" else LONG) for name, how in KILLED.items()],
    indirect=True,
)
def test_a_killed_rank(ranks: Ranks, attack: Attack) -> None:
    """The other ranks raise an error that names it and its machine, although gloo's own does not."""
    several = ranks.count > 2
    attack(
        f"kill of one of {'three' if several else 'two'} {'machines' if ranks.machines else 'ranks'}",
        tries=1,
        outcome=f"the other {'ones end' if several else 'one ends'} with RankLostError",
    )
    where = "node1" if ranks.machines else platform.node()
    for rank in range(0, ranks.count, 2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        assert f"RankLostError: Rank 1 on {where} was killed or crashed" in ranks.said(rank)
    assert ranks.status(1) == -signal.SIGKILL
    assert ranks.seconds_since_work() < lenient(60)


ASKED = [(1,), pytest.param((0,), marks=LONG), pytest.param((0, 1), marks=LONG)]


@pytest.mark.parametrize("ranks", [("nothing",)], indirect=True)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_sigterm(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """All ranks end after the same batch, and can still save a checkpoint together."""
    attack("SIGTERM to one or both of two machines", tries=1, outcome="both save a checkpoint and end")
    ranks.send(signal.SIGTERM, *asked)
    for rank in range(2):
        assert ranks.status(rank) == 0, ranks.said(rank)
        assert "received SIGTERM" in ranks.said(rank)
        assert len(asked) == 2 or f"rank {asked[0]} on node{asked[0]} received SIGTERM" in ranks.said(rank)
    assert any((ranks.folder / "last.ckpt").iterdir())


@pytest.mark.parametrize("ranks", [("activations",)], ids=str, indirect=True)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_ctrl_c_with_activations_on_storage(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """Both ranks end, the other one says why, and nothing of the activations is left."""
    attack("SIGINT to one or both of two machines", tries=1, outcome="both end and say which one was interrupted")
    ranks.send(signal.SIGINT, *asked)
    for rank in range(2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        interrupted = f"RankLostError: Rank {1 - rank} on node{1 - rank} failed with KeyboardInterrupt"
        assert rank in asked or interrupted in ranks.said(rank), ranks.said(0) + ranks.said(1)
    assert not list(ranks.folder.rglob("*activations*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        *((("nothing", "validate"), asked) for asked in [(1,), (0,), (0, 1)]),
        *((("nothing", doing), (1,)) for doing in ("test", "predict")),
    ],
    ids=str,
    indirect=["ranks"],
)
def test_sigterm_in_an_evaluation(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """All ranks end before their next batch, or as they wait for one that has ended so."""
    what = "SIGTERM to one or both of two machines that evaluate"
    attack(what, tries=1, outcome="both end and say which one was asked")
    ranks.send(signal.SIGTERM, *asked)
    for rank in range(2):
        assert ranks.status(rank) == 0 or "RankLostError" in ranks.said(rank), ranks.said(rank)
        assert any(f"rank {one} on node{one} received SIGTERM" in ranks.said(rank) for one in asked)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("stopped",), ("stopped", "validate")], ids=str, indirect=True)
def test_a_stopped_rank(ranks: Ranks, attack: Attack) -> None:
    """The other rank waits for it in a collective, which no error can end. If it wakes up, it ends as well."""
    attack("SIGSTOP to one of two machines", tries=1, outcome="the other one ends and says which one does not answer")
    assert ranks.status(0) == RANK_LOST_STATUS, ranks.said(0)
    assert f"{NAME} has not answered for {SILENCE:.0f} s" in ranks.said(0)
    assert ranks.seconds_since_work() < lenient(60)
    ranks.send(signal.SIGCONT, 1)
    assert ranks.status(1) != 0
    assert f"{NAME} is lost" in ranks.said(1)


@pytest.mark.parametrize(
    ("ranks", "error"),
    [
        (("interrupted",), "KeyboardInterrupt"),
        *(
            pytest.param(("failed", doing), "ValueError: the fourth batch is bad", marks=LONG)
            for doing in ("fit", "validate")
        ),
    ],
    ids=str,
    indirect=["ranks"],
)
def test_a_rank_that_fails_alone(error: str, ranks: Ranks, attack: Attack) -> None:
    """The other rank repeats what it failed with. No rank begins to save a checkpoint, and each says so if it trains.

    Interrupted between backward and step, it does not wait for the other one, which would have to join a gather.
    """
    if ranks.cause == "failed":
        attack("an error on one of two machines", tries=1, outcome="the other one ends with RankLostError")
    for rank in range(2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        assert (f"No checkpoint is saved on rank {rank}" in ranks.said(rank)) == (ranks.doing == "fit")
    assert f"RankLostError: R{NAME[1:]} failed with {error}" in ranks.said(0), ranks.said(0) + ranks.said(1)
    assert not (ranks.folder / "kept").exists()


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("all-failed",), ("all-failed", "validate")], ids=str, indirect=True)
def test_ranks_that_fail_together(ranks: Ranks) -> None:
    """They save a checkpoint together if they have trained. Each ends with its own error."""
    for rank in range(2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        assert re.findall(r"(?m)^(?:\[rank\d\]: )?[\w.]+Error: ", ranks.said(rank)) == [f"[rank{rank}]: ValueError: "]
    assert [path.name for path in ranks.folder.glob("kept/*/latest")] == ["latest"] * ("fit" in ranks.doing)


@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        (("dead-disk",), (0,)),
        *(pytest.param(("dead-disk",), asked, marks=LONG) for asked in [(1,), ()]),
        *(pytest.param(("dead-disk-in-save",), asked, marks=LONG) for asked in [(), (0,), (1,), (0, 1)]),
        pytest.param(("dead-mount",), (), marks=[LONG, RunIf(fuse=True)]),
    ],
    ids=str,
    indirect=["ranks"],
)
def test_a_rank_whose_disk_does_not_answer(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """Both ranks end within the limit and seconds more, or within seconds after SIGTERM; nothing is half saved."""
    attack("a disk of one of two machines stops answering", tries=1, outcome="both end in time and say which, and why")
    ranks.send(signal.SIGTERM)  # to none of them, until all work
    began = time.monotonic()
    if asked:
        time.sleep(1)  # until it waits for its disk
        ranks.send(signal.SIGTERM, *asked)
    for rank in range(2):
        assert ranks.status(rank) != 0, ranks.said(rank)
    limit = IO_TIMEOUT + (0 if asked else lenient(12))
    if ranks.cause == "dead-mount":  # long before the file system is gone, which would release what waits for it
        limit = fuse.SECONDS / 2
    assert time.monotonic() - began < limit, ranks.said(1)
    in_save = ranks.cause == "dead-disk-in-save"
    for rank in range(2) if in_save else (1,):
        named = "commit.bin'" if ranks.cause == "dead-disk" else "StorageTimeoutError"
        assert named in ranks.said(rank), ranks.said(rank)
        assert "did not return" in ranks.said(rank)
    told = f"ank {asked[0]} on node{asked[0]} received SIGTERM" if asked else f"It comes from {NAME}."
    assert told in ranks.said(0) or (in_save and asked)
    assert not (ranks.folder / "last.ckpt").exists()


@pytest.mark.parametrize("behind", ["", "__cause__", "__context__", "exceptions"])
def test_no_save_follows_the_error_of_a_disk(behind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback that saves after errors does not wait once more for a disk that does not answer, nor does the end.

    The error of the disk may also be behind another, or in a group.
    """
    silent = StorageTimeoutError("It hangs.", "Look for it.")
    error: Any = RuntimeError("Another.") if behind else silent
    if behind:
        setattr(error, behind, (silent,) if behind == "exceptions" else silent)
    with pytest.warns(UserWarning, match="No checkpoint is saved .* a disk does not answer"):
        try:
            raise error
        except Exception:
            assert not SavesAfterError().allowed(Mock(world_size=1))
    monkeypatch.setattr(shutdown, "ask_to_end", asked := Mock())
    shutdown.end_by(error, None)
    asked.assert_called_once()
