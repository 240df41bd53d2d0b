"""When a rank is killed, stops, fails or is asked to end, every rank ends and says which one it was, and why.

Each rank is made up as a machine of its own, but where the test says something else.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from lightning_smartinfinity.native import RANK_LOST_STATUS
from tests.helpers.attacks import Attack
from tests.helpers.fork_server import PRELOADED
from tests.helpers.processes import environments_of
from tests.helpers.waiting import PROCESS_LIMIT, await_that, lenient
from tests.training.lost_rank_worker import IO_TIMEOUT, SILENCE, run_forked

LONG = pytest.mark.long
NAME = "rank 1 on node1"


class Ranks:
    """Ranks that train or evaluate in processes of their own, which have everything imported.

    Args:
        folder: Folder of the test.
        cause: What happens to rank 1.
        doing: What they do.
        count: How many they are.
        machines: Whether each is on a machine ``node<rank>`` of its own.
    """

    def __init__(self, folder: Path, cause: str, doing: str = "fit", count: int = 2, *, machines: bool = True) -> None:
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED, "tests.training.lost_rank_worker"])
        self.processes = []
        self._port = ExitStack()
        for rank, environment in enumerate(self._port.enter_context(environments_of(count))):
            arguments = (environment, folder / f"output-{rank}", str(folder), cause, doing, str(count))
            arguments += ("--machines",) if machines else ()
            self.processes.append(context.Process(target=run_forked, args=arguments))
            self.processes[-1].start()

    def await_work(self) -> None:
        """Return when all ranks are in their fourth batch."""
        await_that(self._work_or_ended, seconds=PROCESS_LIMIT, told=lambda: f"{self.said(0)}\n{self.said(1)}")

    def _work_or_ended(self) -> bool:
        return all(
            (self.folder / f"at-work-{rank}").exists() or process.exitcode is not None
            for rank, process in enumerate(self.processes)
        )

    def terminate(self, *ranks: int) -> None:
        """Send SIGTERM when all ranks are at work."""
        self.await_work()
        for rank in ranks:
            self.send(signal.SIGTERM, rank)

    def send(self, signum: int, rank: int) -> None:
        """Send a signal to a rank."""
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, signum)

    def status(self, rank: int) -> int:
        """Wait until a rank ends, and return its exit status."""
        self.processes[rank].join(PROCESS_LIMIT)
        status = self.processes[rank].exitcode
        assert status is not None, self.said(rank)
        return status

    def said(self, rank: int) -> str:
        """Return what a rank has written."""
        return (self.folder / f"output-{rank}").read_text()

    def seconds_since_work(self) -> float:
        """Return how long ago rank 1 began its fourth batch."""
        return time.time() - (self.folder / "at-work-1").stat().st_mtime

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            process.kill()
            process.join(PROCESS_LIMIT)
        self._port.close()


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Ranks to which the parameter of the test happens while they do what it says, or train."""
    started = Ranks(tmp_path, *request.param)
    yield started
    started.kill()


@pytest.mark.parametrize("ranks", [("killed",)], indirect=True)
def test_a_killed_rank(ranks: Ranks, attack: Attack) -> None:
    """The rank on the other machine raises an error that names it, although gloo's own does not."""
    attack("kill of one of two machines", tries=1, outcome="the other one ends with RankLostError")
    assert ranks.status(0) == 1, ranks.said(0)
    assert ranks.seconds_since_work() < lenient(60)
    assert f"RankLostError: R{NAME[1:]} was killed or crashed" in ranks.said(0)
    assert "The logger ended with 'failed'." in ranks.said(0)
    assert ranks.status(1) == -signal.SIGKILL


@pytest.mark.long
def test_a_killed_rank_of_the_same_machine(tmp_path: Path, attack: Attack) -> None:
    """The other rank raises an error that names it, and their machine."""
    attack("kill of one of two ranks", tries=1, outcome="the other one ends with RankLostError")
    ranks = Ranks(tmp_path, "killed", machines=False)
    try:
        assert ranks.status(0) == 1, ranks.said(0)
        assert f"RankLostError: Rank 1 on {platform.node()} was killed or crashed" in ranks.said(0)
    finally:
        ranks.kill()


@pytest.mark.long
@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(("killed", doing), id=doing)
        for doing in ("validate", "test", "predict", "fabric", "fabric-evaluation")
    ],
    indirect=True,
)
def test_a_rank_killed_elsewhere_than_in_a_fit(ranks: Ranks, attack: Attack) -> None:
    """Evaluations, and the loops of Fabric, end alike."""
    attack("kill of one of two machines", tries=1, outcome="the other one ends with RankLostError")
    assert ranks.status(0) == 1, ranks.said(0)
    assert f"RankLostError: R{NAME[1:]} was killed or crashed" in ranks.said(0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("killed", "fit", 3), ("killed", "validate", 3)], ids=str, indirect=True)
def test_one_of_three_ranks(ranks: Ranks, attack: Attack) -> None:
    """Both others raise the error, though only one of them is connected with the rank that is missing."""
    attack("kill of one of three machines", tries=1, outcome="the other ones end with RankLostError")
    for rank in (0, 2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        assert f"RankLostError: R{NAME[1:]} was killed or crashed" in ranks.said(rank)


@pytest.mark.parametrize("ranks", [("nothing",)], indirect=True)
@pytest.mark.parametrize("asked", [(1,), pytest.param((0,), marks=LONG), pytest.param((0, 1), marks=LONG)], ids=str)
def test_sigterm(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """All ranks end after the same batch, and can still save a checkpoint together."""
    attack("SIGTERM to one or both of two machines", tries=1, outcome="both save a checkpoint and end")
    ranks.terminate(*asked)
    for rank in range(2):
        assert ranks.status(rank) == 0, ranks.said(rank)
        assert "received SIGTERM" in ranks.said(rank)
        assert len(asked) == 2 or f"rank {asked[0]} on node{asked[0]} received SIGTERM" in ranks.said(rank)
    assert any((ranks.folder / "last.ckpt").iterdir())


@pytest.mark.parametrize("ranks", [("activations",)], ids=str, indirect=True)
@pytest.mark.parametrize("asked", [(1,), pytest.param((0,), marks=LONG), pytest.param((0, 1), marks=LONG)], ids=str)
def test_ctrl_c_with_activations_on_storage(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """Both ranks end, the other one says why, and nothing of the activations is left."""
    attack("SIGINT to one or both of two machines", tries=1, outcome="both end and say which one was interrupted")
    ranks.await_work()
    for rank in asked:
        ranks.send(signal.SIGINT, rank)
    for rank in range(2):
        assert ranks.status(rank) == 1, ranks.said(rank)
        interrupted = f"RankLostError: Rank {1 - rank} on node{1 - rank} failed with KeyboardInterrupt"
        assert rank in asked or interrupted in ranks.said(rank), ranks.said(rank)
    assert not list(ranks.folder.rglob("*activations*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "asked"),
    [
        pytest.param(("nothing", doing), asked, id=f"{doing}-{asked}")
        for doing, asked in [
            ("validate", (1,)),
            ("validate", (0,)),
            ("validate", (0, 1)),
            ("test", (1,)),
            ("predict", (1,)),
        ]
    ],
    indirect=["ranks"],
)
def test_sigterm_in_an_evaluation(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """All ranks end before their next batch, or as they wait for one that has ended so."""
    what = "SIGTERM to one or both of two machines that evaluate"
    attack(what, tries=1, outcome="both end and say which one was asked")
    ranks.terminate(*asked)
    for rank in range(2):
        assert ranks.status(rank) == 0 or "RankLostError" in ranks.said(rank), ranks.said(rank)
        assert any(f"rank {one} on node{one} received SIGTERM" in ranks.said(rank) for one in asked)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("stopped",), ("stopped", "validate")], ids=str, indirect=True)
def test_a_stopped_rank(ranks: Ranks, attack: Attack) -> None:
    """The other rank waits for it in a collective, which no error can end. If it wakes up, it ends as well."""
    attack("SIGSTOP to one of two machines", tries=1, outcome="the other one ends and says which one does not answer")
    assert ranks.status(0) == RANK_LOST_STATUS, ranks.said(0)
    assert ranks.seconds_since_work() < lenient(60)
    assert f"{NAME} has not answered for {SILENCE:.0f} s" in ranks.said(0)
    ranks.send(signal.SIGCONT, 1)
    assert ranks.status(1) != 0
    assert f"{NAME} is lost" in ranks.said(1)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("failed",), ("failed", "validate")], ids=str, indirect=True)
def test_a_rank_that_fails_alone(ranks: Ranks, attack: Attack) -> None:
    """The other rank repeats what it failed with."""
    attack("an error on one of two machines", tries=1, outcome="the other one ends with RankLostError")
    for rank in range(2):
        assert ranks.status(rank) == 1, ranks.said(rank)
    assert f"RankLostError: R{NAME[1:]} failed with ValueError: the fourth batch is bad" in ranks.said(0)


@pytest.mark.parametrize("ranks", [("dead-disk",)], indirect=True)
@pytest.mark.parametrize("asked", [0, pytest.param(1, marks=LONG), pytest.param(None, marks=LONG)])
def test_a_rank_whose_disk_does_not_answer(asked: int | None, ranks: Ranks, attack: Attack) -> None:
    """Both ranks end within the limit and seconds more, or within seconds after SIGTERM to one of them."""
    attack("a disk of one of two machines stops answering", tries=1, outcome="both end in time and say which, and why")
    ranks.await_work()
    began = time.monotonic()
    if asked is not None:
        time.sleep(1)  # until it waits for its disk
        ranks.send(signal.SIGTERM, asked)
    for rank in range(2):
        assert ranks.status(rank) != 0, ranks.said(rank)
    seconds = time.monotonic() - began
    assert seconds < IO_TIMEOUT + (lenient(12) if asked is None else 0), ranks.said(1)
    assert "commit.bin' did not return within" in ranks.said(1)
    why = f"It comes from {NAME}." if asked is None else f"ank {asked} on node{asked} received SIGTERM"
    assert why in ranks.said(0)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [("dead-disk-in-save",)], indirect=True)
@pytest.mark.parametrize("asked", [(), (0,), (1,), (0, 1)], ids=str)
def test_a_rank_whose_disk_does_not_answer_in_a_save(asked: tuple[int, ...], ranks: Ranks, attack: Attack) -> None:
    """Both ranks end with the disk's error, and nothing has the checkpoint's name."""
    attack("a disk of one of two machines stops answering", tries=1, outcome="both end in time and say which, and why")
    ranks.await_work()
    began = time.monotonic()
    if asked:
        time.sleep(1)  # until it waits for its disk
    for rank in asked:
        ranks.send(signal.SIGTERM, rank)
    for rank in range(2):
        assert ranks.status(rank) != 0, ranks.said(rank)
    assert time.monotonic() - began < IO_TIMEOUT + (0 if asked else lenient(12)), ranks.said(1)
    for rank in range(2):
        assert "StorageTimeoutError" in ranks.said(rank) and "did not return" in ranks.said(rank), ranks.said(rank)
    assert asked or f"It comes from {NAME}." in ranks.said(0)
    assert not (ranks.folder / "last.ckpt").exists()
