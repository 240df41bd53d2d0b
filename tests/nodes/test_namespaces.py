"""Two machines with names, disks and a network of their own, and a file system that remembers failed look-ups."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.namespaces import TwoMachines, why_no_namespaces
from tests.helpers.waiting import PROCESS_LIMIT, await_that
from tests.nodes.test_nodes import assert_resumed

NODE_WORKER = ("-m", "tests.nodes.node_worker")
LOST_RANK = ("-m", "tests.training.lost_rank_worker")


@pytest.fixture
def machines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TwoMachines]:
    reason = why_no_namespaces()
    if reason:
        pytest.skip(reason)
    made = TwoMachines(tmp_path, seconds=getattr(request, "param", 30))
    yield made
    made.close()


def found(machines: TwoMachines, doing: str) -> list[object]:
    """Let both machines do something, and return what each found."""
    assert machines.run(*NODE_WORKER, doing, machines.folder) == [0, 0], machines.output(0).read_text()[-6000:]
    return [json.loads((machines.folder / f"found-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("where", "machines"),
    [
        ("shared", 1),
        pytest.param("shared", 30, marks=pytest.mark.long),
        pytest.param("local", 30, marks=pytest.mark.long),
    ],
    indirect=["machines"],
)
def test_checkpoints(where: str, machines: TwoMachines) -> None:
    """Fits resume to the same bits from a file system that both see, and from parts on their own disks."""
    assert_resumed(found(machines, where))


@pytest.mark.long
def test_saves_beside_remembered_look_ups(machines: TwoMachines, attack: Attack) -> None:
    """Every save is whole, and the newest is in place."""
    assert found(machines, "swaps") == [[True] * 20, [False] * 20]
    for number in range(4):
        files = (machines.folder / "filer" / f"{number}.ckpt" / "checkpoint").glob("*.pt")
        assert [file.read_text() for file in files] == [str(16 + number)] * 2
    attack("saves of two machines that remember failed look-ups", tries=20, outcome="whole, the newest is in place")


@pytest.mark.long
def test_as_on_one_machine(machines: TwoMachines) -> None:
    """Two machines train to the same losses, bit for bit, as two processes of one machine."""
    one = machines.folder / "one"
    (one / "shared").mkdir(parents=True)
    both = found(machines, "shared")
    from tests.nodes.test_nodes import run

    alone = run("shared", one, mounts=False, one_machine=True)
    for rank in range(2):
        for fit in ("whole", "resumed"):
            assert both[rank][fit]["losses"] == alone[rank][fit]["losses"]


@pytest.mark.long
@pytest.mark.parametrize("cause", ["killed", "link"])
def test_a_machine_that_is_lost(cause: str, machines: TwoMachines, attack: Attack) -> None:
    """The other one ends with an error that names the rank and its machine, and says why."""
    folder = machines.folder
    arguments = (*LOST_RANK, folder, "killed" if cause == "killed" else "nothing", "fit", "2")
    # The worker's Trainer takes both for processes of one node; the watch goes by host names and addresses.
    of_one = [{"NODE_RANK": "0", "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = [machines.start(rank, sys.executable, *arguments, env=of_one[rank]) for rank in range(2)]
    try:
        if cause == "link":
            working = [folder / f"at-work-{rank}" for rank in range(2)]
            await_that(lambda: all(path.exists() for path in working), seconds=PROCESS_LIMIT)
            machines.cut_link()
        assert ranks[0].wait(PROCESS_LIMIT) not in (0, -signal.SIGKILL)
        said = machines.output(0).read_text()
        why = "was killed or crashed" if cause == "killed" else "has not answered"
        assert "ank 1 on node1" in said and why in said, said[-6000:]
        if cause == "link":
            assert ranks[1].wait(PROCESS_LIMIT) != 0
            assert "ank 0 on node0" in machines.output(1).read_text()
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    attack(
        f"{'kill' if cause == 'killed' else 'lost link'} of one of two machines",
        tries=1,
        outcome="the other ends, and names it",
    )


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
    page = Path(__file__).parents[2].joinpath("docs/several_nodes.md").read_text().splitlines()
    commands = [line for line in page if line.startswith(launcher) and line.endswith("train.py")]
    if launcher == "srun":
        slurm = f"{SLURM} MASTER_ADDR=10.77.0.1 MASTER_PORT=29500"
        commands = [f"{slurm} SLURM_PROCID={rank} SLURM_NODEID={rank} python train.py" for rank in range(2)]
    assert len(commands) == 2
    (machines.folder / "train.py").write_text(TRAINING)
    unset = "unset RANK WORLD_SIZE LOCAL_RANK NODE_RANK MASTER_ADDR MASTER_PORT"
    path = f"PATH={Path(sys.executable).parent}:$PATH PYTHONPATH={Path.cwd()}"
    ranks = [
        machines.start(rank, "bash", "-c", f"cd {machines.folder}; {unset}; export {path}; {command}")
        for rank, command in enumerate(commands)
    ]
    try:
        said = lambda rank: machines.output(rank).read_text()[-6000:]  # noqa: E731
        assert [process.wait(PROCESS_LIMIT) for process in ranks] == [0, 0], said(0) + said(1)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in range(2):
        stores = machines.folder.glob(f"disk-{rank}/*/default/*")
        assert [path.relative_to(machines.folder).parts[1:] for path in stores] == [
            (f"node{rank}", "default", f"rank-0000{rank}")
        ]
