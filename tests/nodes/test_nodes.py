"""Two machines save, load and remove checkpoints on file systems that both see, or that each has for itself."""

from __future__ import annotations

import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import ConfigError, SmartInfinityStrategy
from lightning_smartinfinity.settings.strategy import nvme_path_of
from lightning_smartinfinity.storage.io.mounts import Mount
from lightning_smartinfinity.zero3.ranks import file_systems
from lightning_smartinfinity.zero3.ranks.file_systems import _remove_old, network_warning
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.nodes import bindfs, why_no_mounts
from tests.helpers.processes import run_module
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.storage_worker import StorageRun, launch

TAG = "checkpoint"
WHOLE = "whole, the newest is in place"
ON_STORAGE = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    **{overlap: {"overlap": overlap} for overlap in ("auto", "none", "forward", "backward")},
    "parameters on storage": {"overlap": "forward", "zero": ON_STORAGE},
    "int8, parameters on storage": {"overlap": "backward", "state_format": "int8", "zero": ON_STORAGE},
}


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Return a folder with a shared file system, a folder for mounts, and the disks that are mounted there."""
    for name in ("shared", "local", "node-0", "node-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "filer").symlink_to("shared")  # by this name no look-up is remembered
    return tmp_path


@pytest.fixture
def _own_mounts(tmp_path_factory: pytest.TempPathFactory) -> None:
    reason = why_no_mounts(tmp_path_factory.mktemp("mounts"))
    if reason:
        pytest.skip(reason)


def run(doing: str, scratch: Path, *, mounts: bool, ranks: int = 2, **options: Any) -> list[Any]:
    """Let two machines do something, with these options of the strategy, and return what each rank found."""
    if not mounts:
        (scratch / "local").rmdir()
    return of_ranks(scratch, doing, "made up", ranks=ranks, **options)


def of_one_machine(scratch: Path, doing: str, **options: Any) -> list[Any]:
    """Let two processes of one machine do something in another folder, and return what each found."""
    (scratch / "one" / "shared").mkdir(parents=True)
    return of_ranks(scratch / "one", doing, "one", ranks=2, **options)


def of_ranks(scratch: Path, doing: str, machines: str, *, ranks: int, **options: Any) -> list[Any]:
    done = run_module("tests.nodes.node_worker", doing, scratch, machines, json.dumps(options), ranks=ranks)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return [json.loads((scratch / f"found-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.usefixtures("_own_mounts")
def test_who_leads(scratch: Path) -> None:
    """In a folder that both see one rank leads; on its own disk each does. Here all lie on one device."""
    ours, theirs = run("places", scratch, mounts=True)
    assert ours["shared"] == [0, 0, True, 2] and theirs["shared"] == [0, 0, True, 2]
    assert [of_rank["other"][1:] for of_rank in (ours, theirs)] == [[0, True, 2], [0, True, 2]]
    assert [of_rank["local"][1:] for of_rank in (ours, theirs)] == [[0, True, 1], [1, True, 1]]
    assert ours["local"][0] != theirs["local"][0]
    assert ours["by_device"] == theirs["by_device"] == [[0, 0, True, 2]] * 3
    assert not list((scratch / "shared").iterdir())


def test_space_that_both_need(scratch: Path) -> None:
    """What both machines need on one file system is summed, though each alone would fit; the error names both."""
    for error in run("space", scratch, mounts=False):
        assert "/shared/storage-0', '" in error and "/shared/storage-1' on 'node0', 'node1', where" in error


@pytest.mark.parametrize(("doing", "found"), [("leftovers", True), ("universal", 2)])
def test_what_one_machine_looks_for(doing: str, found: int, scratch: Path) -> None:
    """One machine looks for leftovers. The other does not remember that none were there, or its next save would wait.

    A universal checkpoint is waited for, though the other machine remembers that nothing was there.
    """
    assert run(doing, scratch, mounts=False) == [found, found]


@pytest.mark.parametrize("num_saves", long_but([8], [8, 20]))
def test_saves_where_failed_look_ups_are_remembered(num_saves: int, scratch: Path, attack: Attack) -> None:
    """Every save is whole and replaces the one before, though the other machine remembers that nothing was there."""
    assert_swapped(scratch / "shared", run("swaps", scratch, mounts=False, num_saves=num_saves), num_saves)
    attack("saves of two machines that remember failed look-ups", tries=num_saves, outcome=WHOLE)


def assert_swapped(shared: Path, leads: list[Any], num_saves: int) -> None:
    """Assert that one machine led all saves, and that the newest save of each path is whole and alone."""
    assert leads == [[True] * num_saves, [False] * num_saves]
    for number in range(4):
        path = shared / f"{number}.ckpt"
        found = {file.name: file.read_text() for file in (path / TAG).glob("*model_states.pt")}
        newest = str(num_saves - 4 + number)
        assert found == {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": newest for rank in range(2)}
        assert sorted(each.name for each in path.iterdir()) == [TAG, "latest"]
    assert sorted(path.name for path in shared.iterdir()) == [f"{number}.ckpt" for number in range(4)]


def assert_saved(looked: list[dict[str, Any]], num_saves: int) -> None:
    """Assert that after each step the newest checkpoints were whole, and nothing else was there."""
    assert len(looked) == num_saves
    for step, found in enumerate(looked, 1):
        over = {f"over-{old % 3}.ckpt": old for old in range(max(step - 3, 0) + 1, step + 1)}
        kept = {f"step={old}.ckpt": old for old in range(max(step - 2, 0) + 1, step + 1)}
        assert found == {**over, **kept, "last.ckpt": step}


@pytest.mark.long
def test_trainings_where_failed_look_ups_are_remembered(scratch: Path, attack: Attack) -> None:
    """Each checkpoint is whole and in place: the newest ones, which ModelCheckpoint prunes, and the replaced ones.

    Saves alone, and a training that prunes and resumes, always run: above, and in ``test_checkpoints_that_both_see``.
    """
    num_saves = 20
    looked, _ = run("saves", scratch, mounts=False, num_saves=num_saves)
    assert_saved(looked, num_saves)
    attack("saves of trainings on two machines that remember failed look-ups", tries=3 * num_saves, outcome=WHOLE)


def assert_resumed(found: list[Any]) -> None:
    for each in found:
        whole, resumed = each["whole"], each["resumed"]
        assert whole["there"] == ["last.ckpt", "step=6.ckpt"]
        assert resumed["there"] == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]  # Lightning keeps what it resumed from
        assert whole["losses"][-2:] == resumed["losses"]
        assert whole["weights"] == resumed["weights"] and whole["state"] == resumed["state"]
        assert whole["validated"] == resumed["validated"]
        assert whole["epochs"][-2:] == resumed["epochs"]  # the validation after step 4 was due when that was saved


@pytest.mark.parametrize("settings", long_but(["forward"], SETTINGS))
def test_checkpoints_that_both_see(settings: str, scratch: Path) -> None:
    """The replaced ones are removed, and training, resuming and validating give the bits of one machine."""
    found = run("shared", scratch, mounts=False, **SETTINGS[settings])
    assert_resumed(found)
    assert [each["whole"] for each in found] == [
        each["whole"] for each in of_one_machine(scratch, "shared", **SETTINGS[settings])
    ]


@RunIf(bindfs=True)
@pytest.mark.usefixtures("_own_mounts")
def test_mounts_that_remember_what_was_there(scratch: Path, attack: Attack) -> None:
    """State, checkpoints and exports are there at once for the other machine, whose mount has looked for a second."""
    num_saves = 4
    with ExitStack() as mounted:
        for name in ("node-0", "node-1"):
            mounted.enter_context(bindfs(scratch / "shared", scratch / name))
        assert_resumed(run("remembering", scratch, mounts=True, num_saves=num_saves, storage="local/storage"))
    assert sorted(path.name for path in (scratch / "shared").iterdir()) == [
        *("0.ckpt", "1.ckpt", "2.ckpt", "exported", "resumed", "storage", "whole")
    ]
    attack("saves of two machines whose mounts remember what was there", tries=num_saves, outcome=WHOLE)


@pytest.mark.usefixtures("_own_mounts")
def test_checkpoints_on_own_disks(scratch: Path) -> None:
    """Each machine has its own part, of which it removes the replaced ones, and resumes and evaluates from it."""
    assert_resumed(run("local", scratch, mounts=True))
    for rank in range(2):
        files = [path.name for path in (scratch / f"node-{rank}/whole/step=6.ckpt/{TAG}").iterdir()]
        assert sorted(files) == [
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            "save_id",
            f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        ]


@pytest.mark.long
@pytest.mark.usefixtures("_own_mounts")
@pytest.mark.parametrize("where", ["shared", "local"])
def test_two_processes_on_each_machine(where: str, scratch: Path) -> None:
    """They share their machine's part, which one of them puts in place."""
    assert_resumed(run(where, scratch, mounts=True, ranks=4))


@pytest.mark.usefixtures("_own_mounts")
def test_a_link_to_another_mount_point_on_each_machine(scratch: Path) -> None:
    """They see that they save to one folder, and one of them leads."""
    assert run("links", scratch, mounts=True) == [[True] * 3, [False] * 3]
    files = {file.name: file.read_text() for file in (scratch / "shared/a.ckpt" / TAG).glob("*model_states.pt")}
    assert files == {f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt": "2" for rank in range(2)}


@pytest.mark.usefixtures("_own_mounts")
def test_a_part_that_is_gone(scratch: Path) -> None:
    """The error names the machine, the rank and what is missing there, on both machines."""
    for part, nothing in run("missing", scratch, mounts=True):
        assert "step=2.ckpt/checkpoint holds no ZeRO-3 optimizer states" in part
        for error in (part, nothing):
            assert "But node0 has the files of the processes 0. It comes from rank 1 on node1." in error
            assert "copy the parts of all machines into one folder" in error


def commands_of_the_page(*starts: str) -> list[str]:
    """Return the commands of docs/several_nodes.md that start with one of these."""
    page = Path(__file__).parents[2].joinpath("docs/several_nodes.md").read_text()
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.startswith(starts)]


@pytest.mark.usefixtures("_own_mounts")
@pytest.mark.parametrize("first", [0, 1])
def test_a_kill_when_one_machine_has_replaced_its_part(first: int, scratch: Path, attack: Attack) -> None:
    """The next load goes on to the new save on both machines, whichever was first."""
    killed = run_module("tests.nodes.node_worker", f"killed-{first}", scratch, "made up", "{}", ranks=2)
    assert killed.returncode != 0
    parts = [scratch / f"node-{rank}/a.ckpt/{TAG}/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(2)]
    assert [part.read_text() for part in parts] == (["new", "old"] if first == 0 else ["old", "new"])
    assert run("load", scratch, mounts=True) == ["new", "new"]
    attack("kill when one of two machines has replaced its part", tries=1, outcome="the next load has one save")


@pytest.mark.long
@pytest.mark.usefixtures("_own_mounts")
def test_parts_in_one_folder(scratch: Path) -> None:
    """The page's commands put parts together; one process then has the weights, and goes on to the same bits."""
    whole = run("local", scratch, mounts=True)[0]["whole"]
    for node in range(2):
        part = scratch / f"node-{node}/whole/step=6.ckpt"
        shutil.copytree(part, scratch / f"parts/node{node}/epoch=3.ckpt")
    commands = commands_of_the_page("cp", "smart-infinity")
    assert len(commands) == 4 == len(commands_of_the_page("")) - len(commands_of_the_page("torchrun", "MASTER_ADDR"))
    for command in commands:
        here = re.sub(" /(parts|shared)/", rf" {scratch}/\1/", command)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(here, shell=True, env={**os.environ, "PATH": path}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "scrub" not in command or done.stdout.endswith("Whole.\n")
    recipe, losses = Recipe(odd=True, frozen=True, validate=True, epoch_batches=2), []
    for name in ("epoch=3.ckpt", "epoch=3.universal"):
        module, trainer = LitTiny(recipe), quiet_trainer(scratch / "alone", max_steps=8)
        (validated,) = trainer.validate(module, ckpt_path=str(scratch / "shared" / name), verbose=False)
        assert validated["val_loss"] == pytest.approx(whole["validated"][0]["val_loss"], rel=1e-3)
        trainer.fit(module, ckpt_path=str(scratch / "shared" / name))
        losses.append(module.losses)
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.long
@pytest.mark.usefixtures("_own_mounts")
def test_ten_kills_with_machines_in_changing_order(scratch: Path, attack: Attack) -> None:
    """The machines keep one interrupted training that could go on, and nothing else, whatever rank each was."""
    for name in ("disk", "disk-0", "disk-1"):
        (scratch / name).mkdir()
    machines: dict[str, Any] = {"devices": 2, "machines": 2, "disks": True, "transfer": {"keep": "on-failure"}}
    fit = StorageRun(out=str(scratch), storage=str(scratch / "disk/storage"), **machines)
    draw, kills = random.Random(19), 0
    while kills < 10:
        moment = draw.choice(["start", "batch start", "step", "batch end"])
        step = 0 if moment == "start" else draw.randrange(1, 6)
        when = {"kill_at": f"kill at {moment}", "kill_step": step, "kill_rank": draw.randrange(2)}
        killed = replace(fit, made_up=draw.sample([0, 1], 2), kill_after=draw.uniform(0, 0.3), **when)
        code, output = launch(killed)
        assert code in (0, -signal.SIGKILL), output[-6000:]
        kills += code != 0
        assert len(ranks_left(scratch)) <= 4, "more than what was interrupted, and one that is archived"
    code, output = launch(replace(fit, made_up=[1, 0]))
    assert code == 0, output[-6000:]
    left = sorted((path.parent.name, path.name) for path in ranks_left(scratch))
    assert left == [("default.aside", "rank-00000"), ("default.aside", "rank-00001")]
    attack(
        "kill of two machines, whose order then changes", tries=kills, outcome="one is archived, nothing else is left"
    )


def ranks_left(scratch: Path) -> list[Path]:
    """Return the folders of ranks on the disks of both machines."""
    return sorted(scratch.glob("disk-?/storage/*/rank-*"))


@pytest.mark.usefixtures("_own_mounts")
def test_parts_of_two_saves_on_two_machines(scratch: Path) -> None:
    """A load goes to the newest save that both have whole; if there is none, the error says who has what."""
    ours, theirs = run("divided", scratch, mounts=True)
    for first in range(2):
        for found in (ours, theirs):
            assert found[f"the new one is not whole {first}"] == "old"
            assert re.search(
                "has parts of different saves, and none is whole on all machines: node0 has that of .* node1 has that",
                found[f"none is whole {first}"],
            )


def test_what_a_kill_left_where_machines_looked(tmp_path: Path) -> None:
    """The next look removes an old file of that name; a new one stays, and whatever a user may have put there."""
    name, hour = ".smart-infinity-" + 31 * "0", 3600
    old, new, content, link, other = (tmp_path / f"{name}{number}" for number in "0123g")
    for path in (old, new, other):
        path.touch()
    content.write_text("mine")
    link.symlink_to(other)
    for path in (old, content, link, other):
        os.utime(path, (time.time() - 2 * hour,) * 2, follow_symlinks=False)
    _remove_old(tmp_path)
    assert set(tmp_path.iterdir()) == {new, content, link, other}


# ---- storage folders may name the machine, the process there and environment variables


def folders_of(*storage: str | Path) -> list[str]:
    return list(map(str, SmartInfinityStrategy(list(storage))._settings.storage or ()))


def test_what_a_path_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables, the host name and the local rank are replaced, in strings and paths, and for parameters, too.

    One folder under two names is still one.
    """
    monkeypatch.setenv("SCRATCH", "/scratch/job 7")
    monkeypatch.setattr(platform, "node", lambda: "node3")
    for variable in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert folders_of("$SCRATCH/a", Path("${SCRATCH}/{node}")) == ["/scratch/job 7/a", "/scratch/job 7/node3"]
    assert folders_of("/mnt/nvme{local_rank}") == ["/mnt/nvme0"]
    monkeypatch.setenv("SLURM_LOCALID", "2")
    assert folders_of("/mnt/nvme{local_rank}") == ["/mnt/nvme2"]
    monkeypatch.setenv("LOCAL_RANK", "1")
    zero = {"offload_param": {"device": "nvme", "nvme_path": "$SCRATCH/{local_rank}"}}
    assert nvme_path_of(zero, owner="SmartInfinityStrategy") == Path("/scratch/job 7/1")
    assert folders_of("/mnt/5$/{other}") == ["/mnt/5$/{other}"]
    with pytest.raises(ConfigError, match="twice"):
        folders_of("$SCRATCH", "/scratch/job 7")


@pytest.mark.parametrize("folder", ["$NOT_SET_HERE/a", "/mnt/${NOT_SET_HERE}", Path("/mnt/$NOT_SET_HERE")])
def test_a_variable_that_is_not_set(folder: str | Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the variable and the machine; no folder of that name is made."""
    monkeypatch.setattr(platform, "node", lambda: "node3")
    assert "NOT_SET_HERE" not in os.environ
    with pytest.raises(ConfigError, match=r"names the environment variable \$\{?NOT_SET_HERE\}?, .* not set on node3"):
        SmartInfinityStrategy(folder)


def test_storage_on_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit warns once, with the folder, the file system and the remedy; a local disk has no warning."""
    assert network_warning([tmp_path]) is None
    mount = Mount(tmp_path, "nfs4", "0:99", "filer:/home")
    monkeypatch.setattr(file_systems, "mount_of", lambda folder: mount)
    with pytest.warns(UserWarning, match=r"network file system \(nfs4, filer:/home\): the .* at every step") as caught:
        fit(LitTiny(Recipe(max_steps=1)), tmp_path, max_steps=1)
    warned = [str(each.message) for each in caught if "network file system" in str(each.message)]
    assert len(warned) == 1 and str(tmp_path) in warned[0]
