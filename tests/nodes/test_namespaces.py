"""Two machines with names, disks and a network of their own, and a file system that remembers failed look-ups."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.attacks import Attack
from tests.helpers.namespaces import TwoMachines, why_no_namespaces
from tests.helpers.waiting import PROCESS_LIMIT, await_that, lenient
from tests.nodes.test_nodes import (
    SETTINGS,
    WHOLE,
    assert_resumed,
    assert_saved,
    assert_swapped,
    commands_of_the_page,
    of_one_machine,
)
from tests.training.storage_worker import StorageRun, end_of, launch, steps_of

LIKE_A_USER = ("--machines", "--default-limits")
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
@pytest.mark.parametrize(("settings", "machines"), [(settings, 1) for settings in SETTINGS], indirect=["machines"])
def test_as_on_one_machine(settings: str, machines: TwoMachines) -> None:
    """Training, resuming and validating give the bits of two processes on one machine."""
    both = found(machines, "shared", **SETTINGS[settings])
    assert_resumed(both)
    assert both == of_one_machine(machines.folder, "shared", **SETTINGS[settings])


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
