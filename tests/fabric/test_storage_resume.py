"""A loop of the user's own that records resumes from storage as if it had never stopped."""

from __future__ import annotations

import random
import signal
import sys
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.common.last_error import last_error, notice_exit
from lightning_smartinfinity.errors import CheckpointError, ConfigError, StorageError, UnsupportedError
from lightning_smartinfinity.resume.start import SavedStep, steps_of as steps_of_checkpoints
from lightning_smartinfinity.storage import find_resumable, recover_store
from tests.fabric.storage_worker import FabricRun, launch
from tests.fabric.worker import quiet_fabric
from tests.helpers.attacks import Attack
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.training.storage_worker import end_of, steps_of
from tests.training.test_loop_exceptions import stores


@pytest.mark.parametrize(
    ("devices", "num_kills", "options"),
    [
        pytest.param(1, 2, {"overlap": "forward", "state_format": "int8"}, marks=pytest.mark.long),
        (2, 1, {"overlap": "forward"}),
        pytest.param(1, 20, {"overlap": "none"}, marks=pytest.mark.long),
        pytest.param(2, 20, {"overlap": "none"}, marks=pytest.mark.long),
    ],
)
def test_kills_at_random(devices: int, num_kills: int, options: dict[str, Any], tmp_path: Path, attack: Attack) -> None:
    """However often it is killed, a loop loses at most a step each time, and ends as one that was never killed."""
    attack(
        "kill at a random moment of a Fabric loop, then fabric.strategy.resume()",
        tries=num_kills,
        outcome="resumed to the bit, at most one step lost",
    )
    settings: dict[str, Any] = {"devices": devices, "options": options, "num_steps": 3 * num_kills + 4}
    assert launch(FabricRun(str(tmp_path / "straight"), **settings))[0] == 0
    draw, done = random.Random(f"{devices} {num_kills}"), 0
    for number in range(num_kills):
        step = max(done, 1) + draw.randrange(1, 3)
        moment = {"kill_step": step, "kill_after": draw.uniform(1e-6, 0.02)}
        code, output = launch(FabricRun(str(tmp_path / "killed"), resume=number > 0, **settings, **moment))
        assert code == -signal.SIGKILL, output[-3000:]
        done = max(steps_of(tmp_path / "killed", devices - 1))
    code, output = launch(FabricRun(str(tmp_path / "killed"), resume=True, **settings))
    assert code == 0, output[-3000:]
    for rank in range(devices):
        assert steps_of(tmp_path / "killed", rank).keys() == steps_of(tmp_path / "straight", rank).keys()
        assert end_of(tmp_path / "killed", rank) == end_of(tmp_path / "straight", rank)
    assert not stores(tmp_path / "killed" / "storage")


def test_an_exit_that_was_caught_ends_no_later_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exit with an error counts until the next training begins."""
    monkeypatch.setattr(sys, "exit", sys.exit)
    monkeypatch.delattr(sys, "last_value", raising=False)
    notice_exit()
    with pytest.raises(SystemExit):
        sys.exit(3)
    assert isinstance(last_error(), SystemExit)
    notice_exit()
    assert last_error() is None


def test_one_script_is_its_own_restart(tmp_path: Path, attack: Attack) -> None:
    """The same command begins, resumes from storage or a checkpoint of the same step, and ends with the same bits."""
    attack("kill, exit or error of a Fabric loop with 'storage-or-new'", tries=3, outcome="resumed to the bit")
    script, broken = {"is_one_script": True, "num_steps": 6}, str(tmp_path / "broken")
    assert launch(FabricRun(str(tmp_path / "straight"), **script))[0] == 0
    for moment, ends, told in (
        ({"kill_step": 2, "kill_after": 1e-6}, -signal.SIGKILL, ""),
        ({"fail_step": 3, "exits": True}, 143, ""),
        ({"save_step": 4, "fail_step": 4}, 1, "Chooses the state in"),
        ({}, 0, "/saved.ckpt of step 4, and not the state in"),
    ):
        code, output = launch(FabricRun(broken, **moment, **script))  # type: ignore[arg-type]
        assert code == ends and told in output, output[-3000:]
    assert steps_of(tmp_path / "broken") == steps_of(tmp_path / "straight")
    assert end_of(tmp_path / "broken") == end_of(tmp_path / "straight")


def test_another_number_of_processes(tmp_path: Path) -> None:
    """A loop goes on from storage as from a checkpoint of the same step, on every rank.

    An error leaves the state and says how to go on; the end of the resumed loop leaves nothing.
    """
    folder, other = tmp_path / "storage", tmp_path / "checkpoint"
    code, output = launch(FabricRun(str(folder), save_step=3, fail_step=3))
    assert (
        code != 0
        and output.count("start the script again with fabric.strategy.resume() before fabric.setup") == 1
        and stores(folder / "storage") == ["default"]
    )
    for out, checkpoint in ((folder, ""), (other, str(folder / "saved.ckpt"))):
        code, output = launch(FabricRun(str(out), devices=2, num_steps=5, resume=True, checkpoint=checkpoint))
        assert code == 0 and output.count("random states are not restored") == 1, output[-3000:]
    for rank in range(2):
        ours, theirs = steps_of(folder, rank), steps_of(other, rank)
        assert [ours[step] for step in (4, 5)] == [theirs[step] for step in (4, 5)]
        assert end_of(folder, rank) == end_of(other, rank)
    assert stores(folder / "storage") == []


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_state_in_memory_is_written_at_an_end(overlap: str, tmp_path: Path) -> None:
    """An error loses no step, and SIGTERM between a step and its record ends the loop after that record."""
    straight, broken = (str(tmp_path / name) for name in ("straight", "broken"))
    assert launch(FabricRun(straight))[0] == 0
    settings: dict[str, Any] = {"options": {"overlap": overlap, "transfer": WRITTEN_BACK}}
    code, output = launch(FabricRun(broken, fail_step=3, **settings))
    assert code == 1 and "its state stays in" in output
    code, output = launch(FabricRun(broken, term_step=5, resume=True, **settings))
    assert code == 128 + signal.SIGTERM and "its state stays in" in output
    assert launch(FabricRun(broken, resume=True, **settings))[0] == 0
    of_straight, of_broken = (Path(out, "steps-0.txt").read_text() for out in (straight, broken))
    assert of_broken == of_straight and end_of(Path(broken)) == end_of(Path(straight))


@pytest.mark.parametrize("records", [False, True])
def test_an_error_within_a_speculative_update(records: bool, tmp_path: Path) -> None:
    """The incomplete step is rolled back, and the state before it is written: with its record, or if it is to stay."""
    settings = {"overlap": "backward", "transfer": {**WRITTEN_BACK, "keep": "on-failure" if records else True}}
    fabric: Any = quiet_fabric(tmp_path / "storage", options=settings)
    module = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Linear(64, 3))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("by a test")

    try:
        for step in range(5):
            values = torch.randn(4, 8, requires_grad=True)
            if step == 4:
                values.register_hook(fail)
            optimizer.engine.set_gradient_accumulation_boundary(True)
            fabric.backward(model(values).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            if records:
                fabric.strategy.record({"model": model, "optimizer": optimizer, "step": step})
    except RuntimeError:
        assert optimizer.engine.optimizer.speculation.on
        close: Any = fabric.strategy._closed_at_exit[1] if records else fabric.strategy.close
        close()  # one of them as the interpreter does at its exit
    store = recover_store([tmp_path / "storage"])
    assert store.steps.tolist() == [4] * 4
    store.close(remove=False)
    if records:
        _, found = find_resumable([tmp_path / "storage"], job="default", rank=0)
        assert [record.step for record in found] == [4]


def test_a_complete_loop_waits_for_no_other_process(tmp_path: Path) -> None:
    """With keep=True its state is written when the interpreter exits, though others exit much earlier or later."""
    fabric: Any = quiet_fabric(tmp_path / "storage", options={"transfer": {**WRITTEN_BACK, "keep": True}})
    module = torch.nn.Linear(8, 64)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(torch.randn(4, 8)).square().mean())
    optimizer.step()
    fabric.strategy.record({"model": model, "optimizer": optimizer})
    optimizer.engine.optimizer.rank_state.keeping.all_come = lambda number: False
    fabric.strategy._closed_at_exit[1]()
    store = recover_store([tmp_path / "storage"])
    assert store.steps.tolist() == [1, 1]
    store.close(remove=False)


@pytest.mark.long
def test_steps_without_a_record(tmp_path: Path) -> None:
    """Two steps behind the last record there is nothing to resume from, so nothing is left; a warning says so."""
    code, output = launch(FabricRun(str(tmp_path / "b"), fail_step=6, record_every=4))
    assert code != 0 and "start the script again" not in output and stores(tmp_path / "b" / "storage") == []
    code, output = launch(FabricRun(str(tmp_path / "c"), record_every=2))
    assert code == 0 and "fabric.strategy.record() follows not every step" in output


def test_wrong_uses(tmp_path: Path) -> None:
    """Each call in the wrong place names what to call instead, and a failed set-up can be repeated."""

    def parts() -> tuple[Any, Any]:
        module = torch.nn.Linear(4, 2)
        return module, torch.optim.AdamW(module.parameters())

    fabric: Any = quiet_fabric(tmp_path, options={"overlap": "none"})
    forgetful: Any = quiet_fabric(tmp_path, options={"transfer": {"keep": False}})
    for of, start, checkpoints, told in (
        (forgetful, "storage", (), "ask to keep nothing to resume from"),
        (fabric, "storage-or-else", (), r"\(start='storage-or-else'\) is unknown"),
        (fabric, "storage", ["a.ckpt"], "chooses among them only with 'storage-or-new'"),
        (fabric, "storage-or-new", ["a.ckpt", 3], r"\(checkpoints=\('a.ckpt', 3\)\) is not a list of paths"),
    ):
        with pytest.raises(ConfigError, match=told):
            of.strategy.resume(start, checkpoints=checkpoints)
    fabric.strategy.resume()
    for _ in range(2):
        with pytest.raises(StorageError, match=r"no optimizer state.* or leave fabric.strategy.resume\(\) out to"):
            fabric.setup(*parts())
    fabric.strategy.close()  # takes resume() back
    model, optimizer = fabric.setup(*parts())
    state = {"model": model, "optimizer": optimizer, "step": 1}
    with pytest.raises(UnsupportedError, match="while a model is being trained"):
        fabric.strategy.resume()
    with pytest.raises(
        CheckpointError, match=r"No training waits .*'storage'.* with fabric.strategy.resume\(\) before"
    ):
        fabric.load("storage", state)
    fabric.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(UnsupportedError, match="between backward and step"):
        fabric.strategy.record(state)
    with pytest.warns(UserWarning, match="between backward and step, and holds no gradients"):
        fabric.save(tmp_path / "between.ckpt", state)
    paths = [str(tmp_path / "between.ckpt")]
    steps = steps_of_checkpoints(lambda: paths, "global_steps", settings=fabric.strategy._settings)
    assert steps == {paths[0]: SavedStep(0, is_whole=False)}
    optimizer.step()
    for wrong, told in (({}, "0 models"), ({"model": fabric.setup_module(torch.nn.Linear(4, 2))}, "without an optimi")):
        with pytest.raises(UnsupportedError, match=told):
            fabric.strategy.record(wrong)
    fabric.strategy.record(state)
    with pytest.warns(UserWarning, match="is a object, which a training record cannot hold"):
        fabric.strategy.record({**state, "step": object()})
    fabric.backward(model(torch.ones(1, 4)).sum(), model=model)
    optimizer.step()  # in which all processes agree on it
    try:
        raise RuntimeError
    except RuntimeError:
        fabric.strategy.close()
    assert stores(tmp_path) == []  # a training whose last record could not be written


def test_after_a_resumed_set_up_comes_the_load(tmp_path: Path) -> None:
    """Before it, neither backward nor record is possible; afterwards a second one reads a checkpoint.

    Hyperparameters and schedules that the script has changed are reported, and used if it asks for them. A checkpoint
    with an object of a class needs consent.
    """
    assert launch(FabricRun(str(tmp_path), fail_step=2))[0] != 0
    fabric: Any = quiet_fabric(tmp_path / "storage", precision="bf16-mixed")
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 128), torch.nn.BatchNorm1d(128), torch.nn.Dropout(0.3), torch.nn.Linear(128, 3)
    )
    fabric.strategy.resume()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.5))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with pytest.raises(UnsupportedError, match=r"Call fabric.load\('storage', state\)"):
        fabric.strategy.record(state)
    with pytest.raises(UnsupportedError, match=r"Call fabric.load\('storage', state\)"):
        fabric.backward(model(torch.ones(2, 8)).sum())
    with pytest.warns(UserWarning, match=r"lr=0.5, but .* lr=0.01, .* call fabric.strategy.use_new_hyperparameters"):
        assert sorted(fabric.load("storage", state)) == ["random", "scheduler"] and state["step"] == 2
    assert optimizer.param_groups[0]["lr"] < 0.02
    with pytest.raises(
        CheckpointError, match=r"No training waits .*'storage'.* with fabric.strategy.resume\(\) before"
    ):
        fabric.load("storage", state)
    fabric.strategy.close()
    assert stores(tmp_path / "storage") == ["default"]  # it was interrupted, and the resumed loop has taken no step
    fabric.strategy.resume()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=50)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}
    with pytest.warns(UserWarning, match="total_steps=50.* in its OneCycleLR, but .* resumes has total_steps=100"):
        fabric.load("storage", state)
    with pytest.warns(UserWarning, match="UserDict"):
        fabric.save(tmp_path / "own.ckpt", {**state, "own": UserDict()})
    fabric.strategy.close()
    assert stores(tmp_path / "storage") == []
    fabric.strategy.resume("storage-or-new", checkpoints=str(tmp_path / "own.ckpt"))  # one path needs no list
    with pytest.raises(CheckpointError, match=r"weights_only=False to fabric\.strategy\.resume"):
        fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.strategy.resume("storage-or-new", checkpoints=[tmp_path / "own.ckpt"], weights_only=False)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), weight_decay=0.3))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    with pytest.warns(UserWarning, match=r"sets weight_decay=0.3, but .* began with weight_decay=0.01, and keeps that"):
        fabric.load("storage", state, weights_only=False)  # either word asks for what resume() chose
    assert state["step"] == 2
    fabric.strategy.close()
    fabric.strategy.use_new_hyperparameters()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.4))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    fabric.load(tmp_path / "own.ckpt", state, weights_only=False)
    assert optimizer.param_groups[0]["lr"] == 0.1  # of the third step
