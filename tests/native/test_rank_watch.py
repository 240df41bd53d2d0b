"""The watch over other ranks' processes: what it notices, what it tells, and how it ends a process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from lightning_smartinfinity.native import RANK_LOST_STATUS, RankWatch
from tests.helpers.long_cases import long_but
from tests.helpers.processes import REPOSITORY
from tests.helpers.waiting import LIMIT, PROCESS_LIMIT, await_that

HOSTS = ["north", "south", "west"]
NEVER = 3600.0


def watch(rank: int, sockets: dict[int, socket.socket], *, silence: float = NEVER) -> RankWatch:
    """Return a watch that ends no process of the tests."""
    connected = [(peer, end.detach()) for peer, end in sockets.items()]
    return RankWatch(rank=rank, hosts=HOSTS, sockets=connected, silence=silence, grace=NEVER, patience=NEVER)


@pytest.fixture
def watches() -> Iterator[list[RankWatch]]:
    """Watches of three ranks, which all train."""
    pairs = {rank: socket.socketpair() for rank in (1, 2)}
    with ExitStack() as closing:
        made = [watch(0, {rank: ends[0] for rank, ends in pairs.items()})]
        made += [watch(rank, {0: ends[1]}) for rank, ends in pairs.items()]
        for each in made:
            closing.callback(each.close)
            each.begin_training()
        yield made


def message(word: int, rank: int) -> bytes:
    """Return a message in the form in which watches send it."""
    return bytes([word, 0, 0, 0]) + rank.to_bytes(4, sys.byteorder)


BEAT, TRAINING, IDLE = (message(word, 0) for word in range(3))


def test_an_error_is_told_to_every_rank_but_its_own(watches: list[RankWatch]) -> None:
    """Rank 0 passes on what rank 1 says. A training that failed on all ranks does not end the next one."""
    watches[1].tell_failure("failed with an error")
    for rank in (0, 2):
        failed = watches[rank].wait(LIMIT).failed
        assert (failed.rank, failed.why) == (1, "failed with an error")
    assert watches[1].report().failed is None
    watches[1].begin_training()
    await_that(lambda: not any(watch.report().failed for watch in watches))


def test_a_rank_that_ends_as_it_should_is_not_lost(watches: list[RankWatch]) -> None:
    """Rank 0 hears its farewell, and no process ends."""
    watches[1].close()
    report = watches[0].wait(LIMIT)
    assert report.left.rank == 1 and report.lost is None and watches[2].wait(0.2).lost is None


@pytest.mark.parametrize(
    ("words", "closes", "expected"),
    [
        pytest.param(TRAINING, True, "was killed or crashed", id="a connection that closes within a training"),
        pytest.param(b"", True, None, id="one that closes before a training"),
        pytest.param(TRAINING + IDLE, True, None, id="one that closes after a training"),
        pytest.param(TRAINING + BEAT, False, "has not answered for", id="silence"),
        pytest.param(TRAINING + b"\xff" * 64, False, "", id="what no watch sends"),
    ],
)
def test_whether_rank_0_is_lost(words: bytes, closes: bool, expected: str | None) -> None:
    """The kernel closes a killed process's connections. A process that does not train may end without a word."""
    rank_0, theirs = socket.socketpair()
    with rank_0, closing(watch(1, {0: theirs}, silence=0.5)) as of_rank_1:
        of_rank_1.begin_training()
        rank_0.sendall(words)
        if closes:
            rank_0.close()
        # A second is twice the time after which silence counts.
        lost = of_rank_1.wait(1.0 if expected is None else LIMIT).lost
    assert (lost is None) == (expected is None)
    assert expected is None or (lost.rank == 0 and lost.why.startswith(expected))


RANKS = """
import os, signal, socket, sys, time
from lightning_smartinfinity.native import RankWatch

ends = socket.socketpair()
child = os.fork()
rank = 1 if child == 0 else 0
ends[1 - rank].close()
seconds = dict(silence=float(sys.argv[2]), grace=0.2, patience=0.2)
watch = RankWatch(rank=rank, hosts=["north", "south"], sockets=[(1 - rank, ends[rank].detach())], **seconds)
watch.begin_training()
watch.hear_sigterm()
exec(sys.argv[1])
"""


def ranks(code: str, *, silence: float = NEVER) -> subprocess.CompletedProcess[str]:
    """Run code on two ranks, of which rank 0 is the process whose status is returned.

    They write to files, since pipes would end with the last of the processes.
    """
    command = [sys.executable, "-c", textwrap.dedent(RANKS), textwrap.dedent(code), str(silence)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, stdout=out, stderr=err, timeout=PROCESS_LIMIT, check=False
        )
        out.seek(0), err.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, out.read(), err.read())


def test_a_killed_process_ends_the_other_ranks() -> None:
    """Rank 0 blocks for ever, holding Python's lock. It ends, and says why.

    Rank 1's child keeps no connection open. It outlives it, as a DataLoader's worker may, and ends by SIGTERM as it
    always does.
    """
    done = ranks("""
        import ctypes
        if rank == 1:
            worker = os.fork()
            if worker == 0:
                os.closerange(1, 3)  # the pipes, whose ends the test awaits
                time.sleep(1000)
            print(worker, flush=True)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        ctypes.PyDLL(None).sleep(1000)
    """)
    os.kill(int(done.stdout), signal.SIGTERM)
    assert done.returncode == RANK_LOST_STATUS, done.stderr
    assert "smart_infinity, rank 0: rank 1 on south is lost: it was killed or crashed.\n" in done.stderr
    assert "ends now, because rank 1 on south was killed or crashed.\n" in done.stderr


def test_sigterm_for_a_training_that_is_over(watches: list[RankWatch]) -> None:
    """A rank that was told after its own end of the training does not end the next one by it."""
    watches[0].end_training()
    watches[2].tell_sigterm()
    await_that(lambda: watches[0].report().asked is not None)
    watches[2].end_training()
    await_that(lambda: watches[0].report().asked is None)


# The process ends a batch of a usual length and a checkpoint. It ends by SIGTERM if it then goes on to wait.
TAKES_TIME = """
if rank == 1:
    watch.end_training()
    time.sleep(1000)
time.sleep(0.3)
signal.signal(signal.SIGTERM, lambda *_: None)
watch.hear_sigterm()
if takes_time == "a checkpoint":
    watch.begin_saving()
else:
    watch.note_batch()
    time.sleep(0.6)
    watch.note_batch()
os.kill(os.getpid(), signal.SIGTERM)
until = time.monotonic() + 0.6
while time.monotonic() < until:
    time.sleep(0.01)
print("done", flush=True)
if takes_time == "a checkpoint":
    watch.end_saving()
os.system("(sleep 5; kill -KILL %d) &" % child)
time.sleep(1000)
"""
SCENARIOS: dict[str, tuple[str, float, int, str, list[str]]] = {
    **{
        f"SIGTERM in {what} that takes longer than the patience": (
            f"takes_time = {what!r}\n{TAKES_TIME}",
            NEVER,
            RANK_LOST_STATUS,
            "done\n",
            ["ends now, because rank 0 on north received SIGTERM"],
        )
        for what in ("a long batch", "a checkpoint")
    },
    # Rank 1 first holds Python's lock for longer than the allowed silence. That must not count as silence.
    "a stopped process is lost and one that computes is not": (
        """
        import ctypes
        if rank == 1:
            ctypes.PyDLL(None).sleep(2)
            os.kill(os.getpid(), signal.SIGSTOP)
        began = time.monotonic()
        while watch.report().lost is None:
            time.sleep(0.01)
        print(time.monotonic() - began > 2, watch.report().lost.why)
        os.kill(child, signal.SIGKILL)
        sys.stdout.flush()
        ctypes.PyDLL(None).sleep(1000)
        """,
        1,
        RANK_LOST_STATUS,
        "True has not answered for 1 s\n",
        [],
    ),
    # It comes while Python waits for its lock for ever, and rank 0 learns why rank 1 ended.
    "SIGTERM without a handler": (
        """
        import ctypes
        if rank == 1:
            time.sleep(0.3)
            os.system(f"(sleep 0.3; kill -TERM {os.getpid()}) &")
            ctypes.PyDLL(None).sleep(1000)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(1000)
        """,
        NEVER,
        RANK_LOST_STATUS,
        f"{-signal.SIGTERM}\n",
        [f"smart_infinity, rank {rank}: rank 1 on south received SIGTERM.\n" for rank in range(2)],
    ),
    # The handler runs, and the process goes on as long as its patience and that of the others lasts.
    "SIGTERM beside a handler": (
        """
        if rank == 1:
            heard = []
            signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
            watch.hear_sigterm()
            watch.hear_sigterm()  # again: it must not put itself in front of itself
            os.kill(os.getpid(), signal.SIGTERM)
            watch.agree()
            time.sleep(0.5)
            print(heard, flush=True)
            watch.end_training()
            sys.exit()
        while watch.report().asked is None:
            time.sleep(0.01)
        watch.agree()
        os.waitpid(child, 0)
        watch.close()
        """,
        NEVER,
        0,
        "[1]\n",
        [],
    ),
    # A pause of the machine, which is longer than silence may last, ends no rank.
    "all ranks stopped alike": (
        """
        if rank == 1:
            time.sleep(3)
            print(watch.report().lost, flush=True)
            watch.close()
            sys.exit()
        pause = f"sleep 0.5; kill -STOP {os.getpid()} {child}; sleep 2; kill -CONT {os.getpid()}; kill -CONT {child}"
        os.system(f"({pause}) &")
        time.sleep(3)
        print(watch.report().lost, flush=True)
        os.waitpid(child, 0)
        watch.close()
        """,
        1,
        0,
        "None\nNone\n",
        [],
    ),
    # Its full pipe delays no word to the other ranks, no Python and no end.
    "a stderr that nobody reads": (
        """
        if rank == 1:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        os.dup2(os.pipe()[1], 2)
        os.set_blocking(2, False)
        try:
            while True:
                os.write(2, b"x" * 4096)
        except BlockingIOError:
            os.set_blocking(2, True)
        while watch.report().lost is None:
            time.sleep(0.01)
        print(watch.report().lost.rank, flush=True)
        time.sleep(1000)
        """,
        NEVER,
        RANK_LOST_STATUS,
        "1\n",
        [],
    ),
    # The handler that is there hears it. The next training does not end by it.
    "SIGTERM out of a training": (
        """
        if rank == 1:
            time.sleep(1000)
        watch.end_training()
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
        watch.hear_sigterm()
        os.kill(os.getpid(), signal.SIGTERM)
        watch.wait(0.5)
        watch.begin_training()
        print(heard, watch.report().asked, flush=True)
        os.kill(child, signal.SIGKILL)
        time.sleep(1000)
        """,
        NEVER,
        RANK_LOST_STATUS,
        "[1] None\n",
        [],
    ),
    # It ends a process without a handler although nobody listens any more. The farewell waits for a stopped rank.
    "SIGTERM in the farewell of a watch": (
        """
        import threading
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        os.system(f"(sleep 8; kill -KILL {child}) &")
        time.sleep(0.5)
        for _ in range(1000):
            watch.tell_failure("x" * 4000)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        watch.close()
        print("still here", flush=True)
        time.sleep(1)
        """,
        NEVER,
        -signal.SIGTERM,
        "",
        [],
    ),
}
"""What two ranks do, the silence that they endure, status and output of rank 0, and what both tell on stderr."""


@pytest.mark.parametrize("scenario", long_but([name for name in SCENARIOS if "a checkpoint" not in name], SCENARIOS))
def test_two_ranks(scenario: str) -> None:
    """Rank 0 goes on, or ends as it should."""
    code, silence, status, output, told = SCENARIOS[scenario]
    done = ranks(code, silence=silence)
    assert (done.returncode, done.stdout) == (status, output), done.stderr
    assert all(line in done.stderr for line in told), done.stderr
