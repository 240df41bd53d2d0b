"""Two machines with names, disks and a network of their own, and a file system that remembers failed look-ups.

They are network namespaces with host names, boot ids and disks. bindfs mounts one folder once for each of them, and
caches failed look-ups as NFS does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.processes import REPOSITORY
from tests.helpers.runif import NO_NAMESPACES
from tests.helpers.waiting import PROCESS_LIMIT, await_that, lenient
from tests.nodes.test_nodes import (
    WHOLE,
    assert_resumed,
    assert_saved,
    assert_swapped,
    commands_of_the_page,
)
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

LIKE_A_USER = ("--machines", "--default-limits")
NODE_WORKER = ("-m", "tests.nodes.node_worker")
LOST_RANK = ("-m", "tests.training.lost_rank_worker")


_COMMANDS = ("ip", "unshare", "bindfs", "fusermount", "mount", "hostname")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PORT = "29511"


def why_no_namespaces() -> str | None:
    """Return why there cannot be two machines here; None if there can."""
    missing = [name for name in _COMMANDS if shutil.which(name) is None]
    if missing:
        return f"{NO_NAMESPACES}: {', '.join(missing)} not installed"
    if not os.access("/dev/fuse", os.W_OK):
        return f"{NO_NAMESPACES}: no access to /dev/fuse"
    name = f"si-probe-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"{NO_NAMESPACES}: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return None


class TwoMachines:
    """Machines ``node0`` and ``node1`` with a link between them; :meth:`close` removes them.

    Both see ``shared``, and a failed look-up there is remembered. Each sees a disk of its own as ``local``.

    Args:
        folder: Folder for the file systems.
        seconds: How long a failed look-up is remembered.
    """

    def __init__(self, folder: Path, *, seconds: int = 30) -> None:
        self.shared, self.local = folder / "shared", folder / "local"
        self.folder = folder
        self._names = [f"si-{os.getpid()}-{rank}" for rank in range(2)]
        self._opened = ExitStack()
        with ExitStack() as undo:
            undo.callback(self.close)
            self._make(seconds)
            undo.pop_all()

    def _make(self, seconds: int) -> None:
        for name in ("shared", "local", "filer"):
            (self.folder / name).mkdir()
        for rank, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            self._opened.callback(_run, "ip", "netns", "delete", name)
            (self.folder / f"disk-{rank}").mkdir()
            (self.folder / f"boot-{rank}").write_text(f"boot of node{rank}\n")
            view = self.folder / f"view-{rank}"
            view.mkdir()
            _run("bindfs", "-o", f"negative_timeout={seconds}", self.folder / "filer", view)
            self._opened.callback(_run, "fusermount", "-uz", view)
        _run(
            "ip", "link", "add", "si0", "netns", self._names[0], "type", "veth", "peer", "si1", "netns", self._names[1]
        )
        for rank in range(2):
            self._ip(rank, "address", "add", f"10.77.0.{rank + 1}/24", "dev", f"si{rank}")
            self._ip(rank, "link", "set", f"si{rank}", "up")
            self._ip(rank, "link", "set", "lo", "up")

    def start(self, rank: int, *command: str | Path) -> subprocess.Popen[str]:
        """Start a command on a machine, with the variables by which ranks find each other."""
        of_group = {
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": _PORT,
            "WORLD_SIZE": "2",
            "RANK": str(rank),
            "NODE_RANK": str(rank),
            "LOCAL_RANK": "0",
            "GLOO_SOCKET_IFNAME": f"si{rank}",
            "DS_ACCELERATOR": "cpu",
        }
        becoming = (
            f"hostname node{rank} && mount --bind {self.folder}/disk-{rank} {self.local}"
            f" && mount --bind {self.folder}/view-{rank} {self.shared}"
            f' && mount --bind {self.folder}/boot-{rank} {_BOOT_ID} && exec "$@"'
        )
        inside = ["unshare", "--mount", "--uts", "bash", "-c", becoming, "bash", *map(str, command)]
        with self.output(rank).open("w") as output:
            return subprocess.Popen(
                ["ip", "netns", "exec", self._names[rank], *inside],
                cwd=REPOSITORY,
                env={**fresh_environment(), **of_group},
                stdout=output,
                stderr=output,
                text=True,
            )

    @contextmanager
    def started(self, *command: str | Path, other: Sequence[str | Path] = ()) -> Iterator[list[subprocess.Popen[str]]]:
        """Start a command on both machines, or another one on the second; kill what still runs in the end."""
        processes = [self.start(rank, *(other if rank and other else command)) for rank in range(2)]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()

    def run(self, *command: str | Path) -> list[int]:
        """Run a command of Python's on both machines and return the exit statuses."""
        with self.started(sys.executable, *command) as processes:
            return [process.wait(PROCESS_LIMIT) for process in processes]

    def output(self, rank: int) -> Path:
        """Return the path of what a machine has said."""
        return self.folder / f"output-{rank}"

    def cut_link(self) -> None:
        """Let no packet pass between the machines any more."""
        self._ip(1, "link", "set", "si1", "down")

    def close(self) -> None:
        """Remove the machines; idempotent."""
        self._opened.close()

    def _ip(self, rank: int, *arguments: str) -> None:
        _run("ip", "-netns", self._names[rank], *arguments)


def _run(*command: str | Path) -> None:
    subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=PROCESS_LIMIT)


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoMachines]:
    reason = why_no_namespaces()
    if reason:
        pytest.skip(reason)
    made = TwoMachines(tmp_path, seconds=getattr(request, "param", 30))
    yield made
    made.close()


def found(machines: TwoMachines, doing: str, **options: Any) -> list[Any]:
    """Let both machines do something, with these options of the strategy, and return what each found."""
    codes = machines.run(*NODE_WORKER, doing, machines.folder, "true", json.dumps(options))
    assert codes == [0, 0], machines.output(0).read_text()[-6000:]
    return [json.loads((machines.folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.long  # test_nodes.py always has them, on made-up machines
@pytest.mark.parametrize(("where", "machines"), [("shared", 1), ("shared", 30), ("local", 30)], indirect=["machines"])
def test_checkpoints(where: str, machines: TwoMachines) -> None:
    """Fits resume to the same bits from a file system that both see, and from parts on their own disks."""
    assert_resumed(found(machines, where))


@pytest.mark.long
@pytest.mark.parametrize(
    ("doing", "machines", "what", "tries"),
    [
        ("swaps", 5, "saves of two machines", 20),  # each save waits until that has passed
        ("saves", 30, "saves of trainings on two machines", 60),
    ],
    indirect=["machines"],
)
def test_saves_beside_remembered_look_ups(
    doing: str, machines: TwoMachines, what: str, tries: int, attack: Attack
) -> None:
    """Every save is whole, and the newest is in place, also where ModelCheckpoint prunes the others."""
    saved = found(machines, doing, num_saves=20)
    if doing == "swaps":
        assert_swapped(machines.folder / "filer", saved, 20)
    else:
        assert_saved(saved[0], 20)
    attack(f"{what} that remember failed look-ups", tries=tries, outcome=WHOLE)


LOST = {
    "killed": ("kill of one of two machines", "ank 1 on node1 was killed or crashed"),
    "stopped": ("SIGSTOP to one of two machines", "ank 1 on node1 has not answered for 30 s"),
    "failed": ("an error on one of two machines", "ank 1 on node1 failed with ValueError: the fourth batch is bad"),
    "dead-disk": (
        "a disk of one of two machines stops answering",
        "commit.bin' did not return within 45 s. It comes from rank 1 on node1",
    ),
    "link": ("the link between two machines is cut", "ank 1 on node1 has not answered for 30 s"),
}
"""How one of two machines is lost, each with its row of the table and what the other one says."""


@pytest.mark.long
@pytest.mark.parametrize("cause", LOST)
def test_a_machine_that_is_lost(cause: str, machines: TwoMachines, attack: Attack) -> None:
    """The other one ends within a minute, with an error that names the rank and its machine, and says why."""
    folder, (row, told) = machines.folder, LOST[cause]
    arguments = (*LOST_RANK, folder, "nothing" if cause == "link" else cause, "fit", "2", *LIKE_A_USER)
    working = [folder / f"at-work-{rank}" for rank in range(2)]
    with machines.started(sys.executable, *arguments) as ranks:
        await_that(lambda: all(path.exists() for path in working), seconds=PROCESS_LIMIT)
        began = time.monotonic()
        if cause == "link":
            machines.cut_link()
        assert ranks[0].wait(PROCESS_LIMIT) not in (0, -signal.SIGKILL)
        assert time.monotonic() - began < lenient(60)
        said = machines.output(0).read_text()
        assert told in said, said[-6000:]
        if cause == "link":
            assert ranks[1].wait(PROCESS_LIMIT) != 0
            assert "ank 0 on node0 has not answered for 30 s" in machines.output(1).read_text()
    attack(row, tries=1, outcome="the other ends within 60 s, and says which, and why")


@pytest.mark.long
def test_training_goes_on_from_storage(machines: TwoMachines, attack: Attack) -> None:
    """After a kill of one of the machines it goes on from their drives, to the bits of one that never stopped."""
    settings: dict[str, Any] = {"devices": 2, "transfer": {"keep": "on-failure"}, "options": {"overlap": "forward"}}
    alone = StorageRun(out=str(machines.folder / "one"), storage=str(machines.folder / "one/storage"), **settings)
    code, output = launch(alone)
    assert code == 0, output[-4000:]
    both = replace(alone, out=str(machines.folder / "both"), storage=str(machines.local / "{node}"), machines=2)
    (machines.folder / "both").mkdir()
    for run in (replace(both, kill_at="kill at step", kill_step=4, kill_rank=1), replace(both, resume=True, seed=9)):
        (machines.folder / "run.json").write_text(json.dumps(asdict(run)))
        codes = machines.run("-m", "tests.training.storage_worker", machines.folder / "run.json")
        assert codes == [0, 0] if run.resume else codes[1] == -signal.SIGKILL, machines.output(0).read_text()[-4000:]
    for rank in range(2):
        assert steps_of(Path(both.out), rank) == steps_of(Path(alone.out), rank)
        assert end_of(Path(both.out), rank) == end_of(Path(alone.out), rank)
    attack("kill of one of two machines, then ckpt_path='storage'", tries=1, outcome="resumed to the bit")


TRAINING = """
from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from pathlib import Path
strategy = SmartInfinityStrategy("local/{node}", transfer=TransferConfig(keep=True))
quiet_trainer(Path("local"), strategy, num_nodes=2, devices=1).fit(LitTiny(Recipe()))
print("trained")
"""
SLURM = "SLURM_JOB_ID=1 SLURM_JOB_NAME=train SLURM_NTASKS=2 SLURM_NTASKS_PER_NODE=1 SLURM_NNODES=2 SLURM_LOCALID=0"


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["torchrun", "MASTER_ADDR", "srun"])
def test_the_commands_of_the_page(launcher: str, machines: TwoMachines) -> None:
    """Both machines train by the commands of docs/several_nodes.md; for srun its variables stand in."""
    commands = commands_of_the_page(launcher)
    if launcher == "srun":
        slurm = f"{SLURM} MASTER_ADDR=10.77.0.1 MASTER_PORT=29500"
        commands = [f"{slurm} SLURM_PROCID={rank} SLURM_NODEID={rank} python train.py" for rank in range(2)]
    assert len(commands) == 2
    (machines.folder / "train.py").write_text(TRAINING)
    unset = "unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT"
    path = f"PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={Path.cwd()}"
    inside = [("bash", "-c", f"cd {machines.folder}; {unset}; export {path}; {command}") for command in commands]
    with machines.started(*inside[0], other=inside[1]) as ranks:
        said = lambda rank: machines.output(rank).read_text()[-6000:]  # noqa: E731
        assert [process.wait(PROCESS_LIMIT) for process in ranks] == [0, 0], said(0) + said(1)
    for rank in range(2):
        stores = machines.folder.glob(f"disk-{rank}/*/default/*")
        assert [path.relative_to(machines.folder).parts[1:] for path in stores] == [
            (f"node{rank}", "default", f"rank-0000{rank}")
        ]
