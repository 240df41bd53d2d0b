"""An interrupted fit, also one that is killed again and again, resumes from storage as if it had never stopped."""

from __future__ import annotations

import itertools
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest

from lightning_smartinfinity import CheckpointError, ConfigError, StorageError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.storage.folders.rank_folder import RankFolder
from tests.helpers import trainers
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.runif import RunIf
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.stock.systems import Hook
from tests.storage.makers import create
from tests.training.storage_worker import StorageRun, end_of, fit, launch, steps_of

WIDE = {"module": {"width": 128}}  # several tasklets
COMPRESSION = {"compression": {"ratio": 0.1}}


def run_of(folder: Path, **settings: Any) -> StorageRun:
    settings["transfer"] = {"keep": "on-failure", **settings.get("transfer", {})}
    storage = [str(folder / f"storage{number}") for number in range(settings.pop("folders", 1))]
    return StorageRun(out=str(folder), storage=storage, **settings)


def run(folder: Path, *, ends: int | None = None, **settings: Any) -> tuple[int, str]:
    """Fit in processes of their own."""
    return launch(run_of(folder, **settings), ends=ends)


def assert_resumes(folder: Path, straight: Path, **settings: Any) -> None:
    """Assert that a fit resumes to the losses, state, buffers and random numbers of one that never stopped."""
    run(folder, resume=True, seed=9, **settings, ends=0)
    for rank in range(settings.get("devices", 1)):
        assert steps_of(folder, rank) == steps_of(straight, rank)
        assert end_of(folder, rank) == {**end_of(straight, rank), "index": end_of(folder, rank)["index"]}


@pytest.mark.parametrize(
    ("how", "step", "settings"),
    [
        pytest.param(
            "kill at batch end",
            8,
            {"options": {"overlap": "none"}, "trainer": {"val_check_interval": 3}},
            marks=pytest.mark.long,
        ),
        pytest.param(
            "kill at validation",
            6,
            {"options": {"overlap": "forward"}, "trainer": {"val_check_interval": 3}},
            marks=pytest.mark.long,
        ),
        ("kill at batch start", 0, {}),  # at the record of the fit's beginning
        pytest.param(
            "kill at step",
            9,
            {"options": {"overlap": "backward"}, "trainer": {"precision": "32-true"}},
            marks=pytest.mark.long,
        ),
        pytest.param("kill at batch start", 8, {"trainer": {"limit_train_batches": 4}}, marks=pytest.mark.long),
        # test_an_error_after_the_fit always runs.
        pytest.param(
            "error at epoch end",
            12,
            {"options": {"state_format": "int8"}, "module": {"plateau": True}},
            marks=pytest.mark.long,
        ),
        pytest.param("interrupt at batch start", 7, {"transfer": {"durability": "power"}}, marks=pytest.mark.long),
        # Its tasklets are smaller than those that the resuming fit would cut, as those of an earlier version.
        ("term at batch end", 3, {"trainer": {"accumulate_grad_batches": 2}, **WIDE, "granule": 1024}),
        (
            "kill at saved batch end",  # whose checkpoint is whole when micro-batches of the step before are repeated
            4,
            {
                "transfer": {**WRITTEN_BACK, "persist_every": 2},
                "options": COMPRESSION,
                "trainer": {"accumulate_grad_batches": 2},
                "checkpoints": [{"every_n_train_steps": 2, "save_top_k": -1}],
            },
        ),
        ("interrupt at backward", 4, {"devices": 2, "options": {"overlap": "none", "activations": EVERYTHING}}),
        pytest.param(
            "kill at batch start", 5, {"devices": 2, "options": {"overlap": "forward"}}, marks=pytest.mark.long
        ),
    ],
)
def test_every_interruption(
    how: str, step: int, settings: dict[str, Any], straight: Path, tmp_path: Path, attack: Attack
) -> None:
    """Losses, schedulers, callbacks, buffers and random numbers are to the bit those of a fit that never stopped."""
    attack("kill, error or signal in a fit, then ckpt_path='storage'", tries=1, outcome="resumed to the bit")
    whole = tmp_path / "straight" if settings else straight
    assert not settings or run(whole, **settings)[0] == 0
    last = settings.get("devices", 1) - 1
    _, output = run(tmp_path / "broken", kill_at=how, kill_step=step, kill_rank=last, **settings)
    assert not (tmp_path / "broken" / "end-0.json").exists(), output[-2000:]
    killed = how.startswith("kill")
    told = output.count("start the script again with trainer.fit(..., ckpt_path='storage')")
    # Rank 0 reports it if it ends by itself. When rank 1 has ended, rank 0 may be stopped before its report or error.
    reports = "RankLostError: Rank 1" in output if last else not killed
    assert told == reports or (told, last) == (1, 1), output[-4000:]
    assert_resumes(tmp_path / "broken", whole, **{**settings, "granule": 0})
    assert not list(tmp_path.rglob("*-v1.ckpt"))
    assert not (tmp_path / "broken" / "storage0").exists() or not list((tmp_path / "broken" / "storage0").iterdir())


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fit with the default settings that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, ends=0)
    return folder


AT_INTERVALS: dict[str, Any] = {"trainer": {"val_check_interval": 3}, "module": {"width": 128}}


@pytest.fixture(scope="module")
def straight_with_validations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fit that nothing interrupts, all of whose state passes the drive."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, **AT_INTERVALS, ends=0)
    return folder


@pytest.mark.parametrize(
    ("how", "step", "overlap", "transfer", "lost"),
    [
        ("kill at batch start", 4, "backward", {}, 0),  # after a checkpoint was saved beside the training
        ("kill at batch start", 4, "forward", {"dram_cache_bytes": 100_000}, 0),
        ("kill at saved batch end", 4, "none", {"dram_cache_bytes": 100_000}, 2),  # the save before stays
        ("kill at saved batch end", 4, "forward", {}, 2),
        ("kill at validation", 6, "forward", {}, 0),  # after a save, and the module's own hook after that
        ("error at batch start", 4, "backward", {"persist_every": 3}, 0),
        ("error at backward", 5, "none", {}, 0),
        ("error at saved batch end", 4, "forward", {"persist_every": 3}, 1),  # between a step and its record
        ("interrupt at validation", 6, "forward", {"dram_cache_bytes": 100_000}, 0),
        ("error at validation", 3, "none", {}, 0),
        ("term at validation", 6, "backward", {}, 0),
        ("ctrl-c at update", 5, "none", {}, 0),
        ("ctrl-c at update", 8, "forward", {"dram_cache_bytes": 100_000}, 0),
        ("error at epoch end", 6, "none", {}, 0),
    ],
)
def test_what_an_end_loses(
    how: str,
    step: int,
    overlap: str,
    transfer: dict[str, Any],
    lost: int,
    straight_with_validations: Path,
    tmp_path: Path,
) -> None:
    """State in memory is written at a save and at each end that does not come between a step and its record.

    A checkpoint that is newer than the state on storage is not saved again.
    """
    settings = {**AT_INTERVALS, "options": {"overlap": overlap}, "transfer": {**WRITTEN_BACK, **transfer}}
    if how.startswith("kill"):
        settings["checkpoints"] = [{"every_n_train_steps": 2, "save_top_k": -1}]
    _, output = run(tmp_path, kill_at=how, kill_step=step, **settings)
    is_told = "the training resumes after step 3: the training ended after a step or" in output
    assert is_told == (how.startswith("error") and lost > 0), output[-4000:]
    assert output.count("its state stays in") == (not how.startswith("kill")), output[-4000:]
    assert_resumes(tmp_path, straight_with_validations, **settings)
    numbers = [int(line.split()[0]) for line in (tmp_path / "steps-0.txt").read_text().splitlines()]
    assert numbers == [*range(1, step + 1), *range(step + 1 - lost, 19)]
    saved = [path.stem for path in tmp_path.rglob("*.ckpt")]
    assert bool(saved) == how.startswith("kill") and not any("-v" in name for name in saved)


BY_TWO: dict[str, Any] = {**AT_INTERVALS, "devices": 2}


@pytest.fixture(scope="module")
def straight_by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a fit of two processes that nothing interrupts, all of whose state passes the drive."""
    folder = tmp_path_factory.mktemp("straight")
    run(folder, **BY_TWO, ends=0)
    return folder


SOME = {"dram_cache_bytes": 100_000}


@pytest.mark.parametrize(
    ("how", "step", "rank", "overlap", "settings", "lost"),
    [
        ("kill at batch start", 5, 1, "none", {"persist_every": 2}, 1),
        ("kill at batch start", 7, 0, "forward", {"persist_every": 3, **SOME}, 1),
        ("kill at record of an interval", 2, 0, "backward", {"persist_every": 2}, 2),
        ("kill at commit of an interval", 2, 1, "none", {"persist_every": 2, **SOME}, 2),
        ("kill at saved batch end", 4, 1, "forward", {"persist_every": 100}, 2),  # the save before stays
        ("kill at batch start", 3, 0, "none", {"persist_every": 1, "fails": [1, 2, 3]}, 2),  # one rank cannot write
        ("kill at batch start", 5, 1, "none", {"persist_every": 1, "fails": [0, 2, 3], **SOME}, 0),
        ("error at backward", 5, 0, "forward", {"persist_every": 3, **SOME}, 2),  # on one rank
        ("term at batch end", 5, 1, "forward", {"persist_every": 100, **SOME}, 0),  # and then on both
        ("term at validation", 6, 0, "backward", {"persist_every": 100}, 0),
        ("no begin", 7, 1, "forward", {"persist_every": 4}, 3),  # on one rank; both end after this step
        ("no begin", 7, -1, "forward", {"persist_every": 4}, 1),
    ],
)
def test_what_an_end_of_two_processes_loses(
    how: str,
    step: int,
    rank: int,
    overlap: str,
    settings: dict[str, Any],
    lost: int,
    straight_by_two: Path,
    tmp_path: Path,
) -> None:
    """A generation counts when both processes have it; after an error on one, the last one that both have stays."""
    fails, transfer = settings.get("fails", []), {key: value for key, value in settings.items() if key != "fails"}
    settings = {**BY_TWO, "options": {"overlap": overlap}, "transfer": {**WRITTEN_BACK, **transfer}}
    if "saved" in how:
        settings["checkpoints"] = [{"every_n_train_steps": 2, "save_top_k": -1}]
    _, output = run(tmp_path, kill_at=how, kill_step=step, kill_rank=rank, fails=fails, **settings)
    is_told = "not all processes have ended after the same step" in output
    assert is_told == (lost > 0 and rank >= 0) or how.startswith("kill"), output[-4000:]
    assert ("It comes from rank" in output and "A kill would lose" in output) == bool(fails), output[-4000:]
    ended = max(steps_of(tmp_path)) if steps_of(tmp_path) else 0
    assert_resumes(tmp_path, straight_by_two, **settings)
    numbers = [int(line.split()[0]) for line in (tmp_path / "steps-0.txt").read_text().splitlines()]
    assert numbers == [*range(1, ended + 1), *range(ended + 1 - lost, 10)]


def test_one_script_is_its_own_restart(straight: Path, tmp_path: Path, attack: Attack) -> None:
    """The same command begins, resumes after kills and a signal, and ends as one that nothing interrupted."""
    attack("kill or SIGTERM of a script with ckpt_path='storage-or-new'", tries=3, outcome="resumed to the bit")
    script = {"checkpoint": "storage-or-new"}
    run(tmp_path, kill_at="kill at step", kill_step=0, **script, ends=-signal.SIGKILL)  # there is no step to resume yet
    run(tmp_path, kill_at="kill at step", kill_step=4, kill_after=0.005, **script, ends=-signal.SIGKILL)
    run(tmp_path, kill_at="term at batch end", kill_step=8, **script)
    run(tmp_path, **script, ends=0)
    assert steps_of(tmp_path) == steps_of(straight) and end_of(tmp_path) == end_of(straight)


@pytest.mark.parametrize("when", ["end", "saved end"])
def test_an_error_after_the_fit(when: str, straight: Path, tmp_path: Path) -> None:
    """A script that fails before it saves what it has trained leaves the state, from which the fit ends at once.

    ``sys.exit(1)`` is such a failure.
    """
    last = max(steps_of(straight))
    code, output = run(tmp_path / "broken", kill_at=f"error at {when}", kill_step=last)
    assert code == 1, output[-2000:]
    left = list((tmp_path / "broken" / "storage0").iterdir())
    assert bool(left) == (when == "end") == ("ckpt_path='storage'" in output) == ("The training was complete" in output)
    assert "interrupted" not in output
    if left:
        _, output = run(tmp_path / "broken", resume=True, kill_at="exit at end", kill_step=last, ends=1)
        assert "The training was complete, but an error ended the script" in output
        assert_resumes(tmp_path / "broken", straight)


NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}
WHERE: dict[str, dict[str, Any]] = {
    "parameters on storage": {"options": {"zero": NVME}},
    "parameters on storage, at an interval": {
        "options": {"zero": NVME},
        "transfer": {**WRITTEN_BACK, "persist_every": 3},
    },
    "DRAM tier": {"transfer": {"dram_cache_bytes": 100_000}},
    "written at an interval": {"transfer": {**WRITTEN_BACK, "persist_every": 3}},
    "some written at an interval": {"transfer": {**WRITTEN_BACK, "persist_every": 2, "dram_cache_bytes": 100_000}},
    "compressed gradients": {"options": COMPRESSION},
    "cards": {"cards": True, "folders": 2},
    "compressed gradients on cards": {"cards": True, "folders": 2, "options": COMPRESSION},
    "several folders": {"folders": 3},
}
# The kills at random have two processes and compressed gradients, too.
USUAL = {
    ("parameters on storage", "int8_remainder", "forward", 1),
    ("written at an interval", "fp32", "none", 1),
    ("parameters on storage, at an interval", "int8_remainder", "forward", 1),
    ("some written at an interval", "bf16", "backward", 1),
}


@pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs")
@pytest.mark.parametrize(
    ("where", "state_format", "overlap", "devices"),
    [
        pytest.param(
            *case,
            marks=[RunIf(xrt="cards" in case[0]), *([] if case in USUAL else [pytest.mark.long])],
            id="-".join(map(str, case)).replace(" ", "-"),
        )
        for case in itertools.product(WHERE, STATE_FORMATS, ("none", "forward", "backward"), (1, 2))
        if STATE_FORMATS[case[1]].on_cards or "cards" not in case[0]
    ],
)
def test_a_killed_fit_resumes_wherever_the_state_is_stored(
    where: str, state_format: str, overlap: str, devices: int, tmp_path: Path, attack: Attack
) -> None:
    """Wherever state and parameters live, in whatever format, a killed fit goes on to the bits of one that was not."""
    attack("kill in a fit, then ckpt_path='storage'", tries=1, outcome="resumed to the bit")
    settings = {**WIDE, "devices": devices, **WHERE[where]}
    settings["options"] = {"overlap": overlap, "state_format": state_format, **settings.get("options", {})}
    run(tmp_path / "straight", **settings, ends=0)
    moment = {"kill_at": "kill at step", "kill_step": 8, "kill_rank": devices - 1, "kill_after": 0.005}
    run(tmp_path / "broken", **moment, **settings, ends=-signal.SIGKILL)
    assert_resumes(tmp_path / "broken", tmp_path / "straight", **settings)


def test_killed_again_before_its_first_batch(tmp_path: Path) -> None:
    """A resumed fit that is killed before its first batch leaves the point behind a validation that it began at."""
    settings: dict[str, Any] = {"trainer": {"val_check_interval": 3}, "module": {"plateau": True}}
    run(tmp_path / "straight", **settings, ends=0)
    for resume in (False, True):
        moment = {"kill_at": "kill at batch start", "kill_step": 6}
        run(tmp_path / "broken", resume=resume, seed=9 if resume else 1, **moment, **settings, ends=-signal.SIGKILL)
    assert_resumes(tmp_path / "broken", tmp_path / "straight", **settings)


def test_several_optimizer_steps_in_a_batch(tmp_path: Path) -> None:
    """A kill before the second step goes on with the batch from its beginning; behind it, an error says what is lost.

    A warning has said so before.
    """
    settings: dict[str, Any] = {"module": {"steps": 2}, "options": {"overlap": "none"}, "epochs": 1}
    run(tmp_path / "straight", **settings, ends=0)
    code, output = run(tmp_path / "broken", kill_at="kill at step", kill_step=5, **settings)
    assert code == -signal.SIGKILL and "training_step takes several optimizer steps" in output, output[-2000:]
    assert_resumes(tmp_path / "broken", tmp_path / "straight", **settings)
    run(tmp_path / "lost", kill_at="kill at batch end", kill_step=6, **settings, ends=-signal.SIGKILL)
    with pytest.raises(StorageError, match=r"after its last record \(step 4\): several optimizer steps"):
        fit(run_of(tmp_path / "lost", resume=True, **settings))
    # With state in memory only, Ctrl-C in the first step waits for the record after the second one.
    settings["transfer"] = WRITTEN_BACK
    run(tmp_path / "held", kill_at="ctrl-c at update", kill_step=5, **settings)
    assert_resumes(tmp_path / "held", tmp_path / "straight", **settings)


def test_weights_written_at_each_step(tmp_path: Path) -> None:
    """The warning tells of writes between steps, and not of several steps in a batch."""

    def write(trainer: Any) -> None:
        parameter = next(trainer.lightning_module.parameters())
        with deepspeed.zero.GatheredParameters(parameter, modifier_rank=0):
            parameter.data.mul_(0.99)

    with pytest.warns(UserWarning, match="something writes parameters or optimizer state between the steps"):
        trainers.fit(LitTiny(Recipe()), tmp_path, max_steps=3, callbacks=[Hook(step, write) for step in (1, 2, 3)])


def test_a_new_fit_archives_an_interrupted_one(straight: Path, tmp_path: Path) -> None:
    """A fit that does not resume moves the store to another job, which resumes."""
    run(tmp_path, kill_at="kill at batch end", kill_step=5, ends=-signal.SIGKILL)
    code, output = run(tmp_path, kill_at="kill at batch end", kill_step=2)
    assert code != 0 and "after step 4. It was moved to the job 'default.aside'" in output, output[-3000:]
    run(tmp_path, resume=True, transfer={"job": "default.aside"}, ends=0)
    assert end_of(tmp_path) == end_of(straight)


def test_a_part_that_cannot_be_moved(tmp_path: Path) -> None:
    """If one rank cannot move its part, since another process uses it, no rank moves its own, and each says why."""
    settings: dict[str, Any] = {"devices": 2, "folders": 2}
    assert run(tmp_path, kill_at="kill at batch end", kill_step=3, **settings)[0] != 0
    storage = [tmp_path / f"storage{number}" for number in range(2)]
    before = {folder: sorted(folder.glob("*/*")) for folder in storage}
    held = RankFolder(storage[1] / "default/rank-00001", create=False)
    code, output = run(tmp_path, **settings)
    held.close(remove=False)
    assert code != 0 and output.count("StorageLockedError") >= 2 and "It comes from rank 1" in output, output[-3000:]
    assert {folder: sorted(folder.glob("*/*")) for folder in storage} == before


def test_another_model_is_refused_and_loses_nothing(tmp_path: Path) -> None:
    """A store of another model is refused, and can still be resumed. One value that is not trained makes another.

    So is one whose tasklets have a size by an earlier version that a setting of this one cannot use. Otherwise the size
    stays, also where the settings name another one, and after a kill while the training moved to two processes.
    """
    module = {"last": 1.0, **WIDE["module"]}
    settings: dict[str, Any] = {"module": module, "epochs": 1, "granule": 1024}
    run(tmp_path, kill_at="kill at batch end", kill_step=3, **settings, ends=-signal.SIGKILL)
    for other, transfer, told in (
        ({"turned": True}, {}, "its model was"),
        ({"last": 2.0}, {}, "The parameters that are not trained have other values"),
        ({}, {"gradient_bytes": 30_000}, "whose gradients are not whole blocks. Leave it out"),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=told):
            fit(run_of(tmp_path, resume=True, module={**module, **other}, transfer=transfer))
    moved = RankFolder(tmp_path / "storage0/default/rank-00000", create=False)
    moved.mark_archived(successor=bytes(16))
    moved.move("default.aside")
    create([tmp_path / "storage0"], job_id=bytes(16)).close(remove=False)  # of two ranks, and without a step
    with pytest.warns(UserWarning, match="goes on with tasklet_bytes=65536, .* tasklet_bytes=131072 is for new"):
        fit(run_of(tmp_path, resume=True, **settings, transfer={"tasklet_bytes": 128 * 1024})).close()
    assert end_of(tmp_path)["step"] == 6


def test_every_rank_goes_on_with_its_own_random_numbers(tmp_path: Path) -> None:
    """A fit of two processes that resumes from a checkpoint within an epoch draws as one that never stopped."""
    settings: dict[str, Any] = {"devices": 2, "trainer": {"limit_val_batches": 0}}
    saved, resumed = tmp_path / "saved", tmp_path / "resumed"
    run(saved, save_every=5, **settings, ends=0)  # within the second of three epochs
    _, output = run(resumed, checkpoint=str(saved / "last.ckpt"), seed=9, **settings, ends=0)
    assert "random states are not restored" not in output
    for rank in range(2):
        expected = {step: line for step, line in steps_of(saved, rank).items() if step > 5}
        assert steps_of(resumed, rank) == expected != {} and end_of(resumed, rank) == end_of(saved, rank)
    assert steps_of(saved, 0) != steps_of(saved, 1)


TWO: dict[str, Any] = {"devices": 2, "epochs": 2, "options": {"overlap": "none"}}
UNWRITTEN = [
    (1, "term at batch end", False),
    (3, "term at batch end", True),  # the other does not know yet, and both have the record before
    (1, "error at batch end", False),
]


@pytest.mark.parametrize(("first", "end", "stays"), long_but(UNWRITTEN[:2], UNWRITTEN))
def test_one_process_fails_to_record(first: int, end: str, stays: bool, tmp_path: Path, attack: Attack) -> None:
    """The end promises a resume only where there is one, and then it works; and a new fit is never refused."""
    attack("one process cannot write its training records", tries=1, outcome="all keep their state, or none")
    _, output = run(tmp_path, **TWO, kill_at=end, kill_step=3, fails=[1, first, 1000])
    assert output.count("its state stays in") == stays, output[-4000:]
    assert "cannot be resumed from storage here" in output
    states = "storage0/*/rank-*/state.bin"
    assert len(list(tmp_path.glob(states))) == 2 * stays or not end.startswith("term")
    run(tmp_path, **TWO, resume=stays, ends=0)
    assert end_of(tmp_path)["step"] == 6 and not list(tmp_path.glob(states))


@pytest.mark.long
def test_records_that_can_be_written_again(tmp_path: Path) -> None:
    """Once all processes have a record again, the fit can be resumed, to the bit."""
    run(tmp_path / "straight", **TWO, ends=0)
    killed = tmp_path / "killed"
    assert run(killed, **TWO, kill_at="kill at batch start", kill_step=5, fails=[1, 2, 3])[0] == -signal.SIGKILL
    assert_resumes(killed, tmp_path / "straight", **TWO)


# ---- kills at random moments


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
    "written at intervals": {
        "options": {"overlap": "forward"},
        "transfer": {**WRITTEN_BACK, "persist_every": 3, "dram_cache_bytes": 100_000},
        "folders": 2,
    },
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
SHORT = {"forward": 3, "two machines": 1, "written at intervals": 2}
NUM_LONG = 25  # kills of each case: 375 in all
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


class Fits:
    """Fits of one case in a folder, each of which goes on from the one before."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.devices: int = settings.get("devices", 1)
        self.num_steps = NUM_STEPS // self.devices
        interval = settings.get("transfer", {}).get("persist_every", 0)
        self.is_at_intervals, self.most_lost = interval > 0, max(interval, 1)
        folders = [str(folder / "{node}" / f"storage{number}") for number in range(settings.pop("folders", 1))]
        settings["made_up"] = [*range(self.devices)] if settings.get("machines", 1) > 1 else []
        settings["transfer"] = {"keep": "on-failure", **settings.get("transfer", {})}
        settings["module"] = {"width": 128, **settings.get("module", {})}
        self.folder, self.settings = folder, {"storage": folders, "save_every": 4, **settings}

    def fit(self, *, resume: bool, ends: int | None = None, **moment: Any) -> tuple[int, str]:
        seed = 9 if resume and "checkpoint" not in self.settings else 1
        return launch(StorageRun(out=str(self.folder), resume=resume, seed=seed, **self.settings, **moment), ends=ends)

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
        # Killed before the first step was done, or before the first state with a step was complete on storage.
        nothing = "There is no" in output and (before or [0])[-1] <= fits.most_lost * fits.is_at_intervals
        assert code in (0, -signal.SIGKILL) or nothing, (when, step, begun, before, output[-4000:])
        numbers = fits.numbers()
        assert numbers == [] or numbers[0] == 1
        lost = [a - b + 1 for a, b in itertools.pairwise(numbers)]
        assert not lost or (max(lost) <= fits.most_lost and min(lost) >= 0), (when, step, numbers)
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
        outcome="resumed to the bit, at most one step or interval lost",
    )
    straight = Fits(tmp_path / "straight", **{**CASES[name], "machines": 1})
    straight.fit(resume=False, ends=0)
    draw, chains, left, deck = random.Random(f"{name} {num_kills}"), 0, num_kills, list[tuple[str, float]]()
    while left > 0:
        chains += 1
        assert chains <= 4 * num_kills, "too many fits escaped their kill"
        fits = Fits(tmp_path / f"killed{chains}", **CASES[name])
        left -= sum(killed(fits, draw, left, deck))
        for rank in range(fits.devices):
            steps, expected = steps_of(fits.folder, rank), steps_of(straight.folder, rank)
            assert (
                list(steps.items()) == list(expected.items())[: len(steps)]
                and len(steps) >= fits.num_steps - 1
                and len(expected) == fits.num_steps
            )
            if (fits.folder / f"end-{rank}.json").exists():
                assert end_of(fits.folder, rank) == end_of(straight.folder, rank)
