"""A training by transformers' Trainer that was interrupted resumes from storage as if it had never stopped."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_smartinfinity import CheckpointError, ConfigError, StorageError
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.resume import checkpoint_to_resume
from tests.emulated_cuda.build import build, environment
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.processes import environments_of
from tests.helpers.runif import RunIf
from tests.helpers.streamed_state import WRITTEN_BACK
from tests.helpers.waiting import PROCESS_LIMIT
from tests.huggingface.interrupted import MODULE, HuggingRun, Left, launch, train_interrupted
from tests.huggingface.test_second_models import CASES, trainer_of
from tests.huggingface.trained import arguments, calling, dataset, load, train
from tests.native.builds import ROOT


@pytest.fixture(scope="module")
def straight(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Left:
    """Return what a training leaves that nothing interrupts."""
    return train_interrupted(HuggingRun(str(tmp_path_factory.mktemp("straight")), str(model_folder)))


def assert_goes_on(resumed: Left, straight: Left, *, after: int) -> None:
    """Assert that a training went on after this number of steps or one less, first with what follows that step."""
    first = resumed.logs[0][0]
    assert (
        after - 1 <= first <= after
        and resumed.end == straight.end
        and resumed.logs == [log for log in straight.logs if log[0] >= first]
    )


KILLS = [
    *((step, "training_step") for step in (3, 4, 5, 6)),
    *((step, "evaluate") for step in (4, 6, 10)),
    *((step, "_save_rng_state") for step in (3, 6, 10)),
    (6, "_save_optimizer_and_scheduler"),
]


@pytest.mark.parametrize(("step", "method"), long_but([(4, "training_step"), (6, "_save_rng_state")], KILLS))
def test_a_kill(step: int, method: str, straight: Left, model_folder: Path, tmp_path: Path, attack: Attack) -> None:
    """After a kill before a step, in an evaluation or in a save, the rest has the bits of an uninterrupted training.

    From storage it loses nothing. The checkpoint of a killed save is passed over for the one before, even if the save
    replaced one that was whole.
    """
    attack("kill of transformers' Trainer, then resume_from_checkpoint='storage'", tries=1, outcome="same bits")
    run = HuggingRun(str(tmp_path / "killed"), str(model_folder), how="kill", method=method, step=step)
    if saves := (step, method[:5]) == (6, "_save"):
        run = dataclasses.replace(run, changes={"save_total_limit": 2})
        shutil.copytree(Path(straight.out, "checkpoint-10"), Path(run.out, "checkpoint-6"))
    assert launch(run) == -signal.SIGKILL
    if saves:
        attack("kill within a save of transformers' Trainer", tries=1, outcome="the one before is resumed")
        with pytest.raises(CheckpointError, match=r"checkpoint-6'?: its save was not completed"):
            checkpoint_to_resume(str(Path(run.out, "checkpoint-6")), run.out, warn=True)
        copy = shutil.copytree(run.out, tmp_path / "copy", ignore=shutil.ignore_patterns("smart_infinity"))
        with (
            pytest.warns(UserWarning, match="checkpoint-6 is passed over"),
            pytest.warns(UserWarning, match=r"not restored: Counting\. .*restore_callback_states_from_checkpoint=True"),
        ):
            resumed = train_interrupted(dataclasses.replace(run, out=str(copy), how="", resume=True))
        assert [log[0] for log in resumed.logs] == [log[0] for log in straight.logs if log[0] > 3]
    other = shutil.copytree(run.out, tmp_path / "other")
    resumed = train_interrupted(dataclasses.replace(run, how="", resume="storage"))
    assert_goes_on(resumed, straight, after=step)
    if step == 4:  # and 6 or 8 batches of an epoch, after which a window of 5 cannot begin
        changes = {"gradient_accumulation_steps": 5, "max_steps": 7}
        changed = dataclasses.replace(run, out=str(other), how="", resume="storage", changes=changes)
        with pytest.warns(UserWarning, match="after [68] batches .* gradient_accumulation_steps=5 .* are used again"):
            losses = [log[1]["loss"] for log in train_interrupted(changed).logs if "loss" in log[1]]
        assert len(losses) > 3 and min(losses) > 5  # of whole windows


@pytest.mark.parametrize(
    ("how", "error", "transfer"), [("interrupt", KeyboardInterrupt, {}), ("term", SystemExit, WRITTEN_BACK)]
)
def test_ctrl_c(
    how: str,
    error: type[BaseException],
    transfer: dict[str, Any],
    straight: Left,
    model_folder: Path,
    tmp_path: Path,
    attack: Attack,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ctrl-C at one place after the other loses nothing, and the end of the training says how to go on.

    So does SIGTERM with state in memory.

    One script with "storage-or-new" resumes what is newest: here storage, or after Ctrl-C in a save the same from it.
    """
    attack("Ctrl-C in transformers' Trainer, then 'storage-or-new'", tries=4, outcome="same bits")
    run = HuggingRun(
        str(tmp_path), str(model_folder), how=how, resume="storage-or-new", strategy={"transfer": transfer}
    )
    places = [("training_step", 0), ("evaluate", 2), ("_maybe_log_save_evaluate", 5), ("_save_rng_state", 9)]
    for method, step in places:
        caplog.clear()
        with pytest.raises(error):
            train_interrupted(dataclasses.replace(run, method=method, step=step))
        told = "start the script again with trainer.train(resume_from_checkpoint='storage')" in caplog.text
        assert told == (step > 0) == bool(list(tmp_path.glob("smart_infinity/*/*/state.bin")))
    train_interrupted(dataclasses.replace(run, how="", changes={"num_train_epochs": 0}))
    assert "No optimizer step was taken" in caplog.text
    assert_goes_on(train_interrupted(dataclasses.replace(run, how="")), straight, after=9)
    assert not list(tmp_path.glob("smart_infinity/*/*"))


@pytest.mark.parametrize(
    "changes",
    long_but(
        [{"dataloader_num_workers": 1, "lr_scheduler_type": "cosine"}],
        [
            {"dataloader_num_workers": 1, "lr_scheduler_type": "cosine"},
            {"dataloader_num_workers": 2, "max_steps": 7, "logging_steps": 3},
            {"save_strategy": "epoch", "eval_strategy": "epoch", "logging_strategy": "epoch"},
            {"gradient_accumulation_steps": 1, "load_best_model_at_end": True, "save_steps": 2},
            {"accelerator_config": {"use_seedable_sampler": False}, "max_grad_norm": 0.1},
        ],
    ),
)
def test_other_arguments(changes: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    """With workers, at the ends of epochs, and with other logs, the rest has the same bits, too."""
    run = HuggingRun(str(tmp_path / "straight"), str(model_folder), changes=changes)
    expected = train_interrupted(run)
    run = dataclasses.replace(run, out=str(tmp_path / "broken"))
    with pytest.raises(KeyboardInterrupt):
        train_interrupted(dataclasses.replace(run, how="interrupt", method="training_step", step=4))
    resumed = train_interrupted(dataclasses.replace(run, resume="storage"))
    assert resumed.end == expected.end and resumed.logs == expected.logs[-len(resumed.logs) :] != []


@pytest.mark.long
@RunIf(torch_without_cuda=True)
def test_two_ranks(model_folder: Path, tmp_path: Path) -> None:
    """Two ranks, on emulated devices, of which one is killed, go on to the bits of two that nothing interrupts."""

    def run_of(name: str, **moment: Any) -> list[int]:
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        run = HuggingRun(str(out), str(model_folder), strategy={"watchdog_timeout": 5}, **moment)
        path = out / "run.json"
        path.write_text(json.dumps(dataclasses.asdict(run)))
        with environments_of(2) as environments:
            processes = [
                subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(path)],
                    cwd=ROOT,
                    env={**of_rank, **environment(build()), "LOCAL_WORLD_SIZE": "2"},
                )
                for of_rank in environments
            ]
            return [process.wait(PROCESS_LIMIT) for process in processes]

    assert run_of("straight") == [0, 0]
    assert -signal.SIGKILL in run_of("broken", how="kill", method="training_step", step=4)
    assert run_of("broken", resume="storage") == [0, 0]
    for rank in range(2):
        resumed, straight = (
            Left(**json.loads((tmp_path / name / f"left-{rank}.json").read_text())) for name in ("broken", "straight")
        )
        assert_goes_on(resumed, straight, after=4)


def test_trl(model_folder: Path, tmp_path: Path) -> None:
    """TRL's trainers inherit it: an SFTTrainer goes on after Ctrl-C, even in the same process, to the same losses."""

    def stop(args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt

    def losses(trainer: Any) -> list[float]:
        return [log["loss"] for log in trainer.state.log_history if "loss" in log]

    with SmartInfinityTraining(tmp_path / "storage") as training:
        broken = trainer_of(CASES["SFT"], model_folder, tmp_path / "broken", None, deepspeed=training.config)
        broken.add_callback(stopping := calling(on_step_begin=stop))
        with pytest.raises(KeyboardInterrupt):
            broken.train()
        broken.remove_callback(stopping)
        broken.train(resume_from_checkpoint="storage")
    with SmartInfinityTraining(tmp_path / "storage") as training:
        straight = trainer_of(CASES["SFT"], model_folder, tmp_path / "straight", None, deepspeed=training.config)
        straight.train()
    assert losses(broken) == losses(straight)[-2:]


def test_an_error_after_the_training(model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that fails before it saves the model is told that the training was complete, and how to save it.

    ``sys.exit(0)`` is no failure, and ``sys.exit("a message")`` is one.
    """

    def script(
        error: BaseException,
        *,
        rate: float = 0.001,
        factor: float = 0.5,
        resume: str | None = None,
        max_steps: int = 2,
        new: bool = False,
    ) -> None:
        with SmartInfinityTraining(tmp_path / "storage") as training:
            if new:
                training.use_new_hyperparameters()
            model = load(model_folder)
            optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
            both: Any = (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, factor))
            args = arguments(tmp_path, training.config, max_steps=max_steps)
            trainer = transformers.Trainer(model=model, args=args, train_dataset=dataset(2), optimizers=both)
            trainer.train(resume_from_checkpoint=resume)
            steps.append(trainer.state.global_step)
            rates[:] = [log["learning_rate"] for log in trainer.state.log_history if "learning_rate" in log]
            raise error

    steps, rates = list[int](), list[float]()
    with pytest.raises(SystemExit):
        script(SystemExit(0))
    assert "The training was" not in caplog.text and not list(tmp_path.glob("storage/*/*"))
    with pytest.raises(SystemExit, match="a message"):
        script(SystemExit("a message"))
    assert (
        "The training was complete, but an error" in caplog.text
        and "trainer.save_model(folder)" in caplog.text
        and list(tmp_path.glob("storage/*/*/state.bin"))
    )
    with pytest.raises(SystemExit):  # trains on, with a new rate
        script(SystemExit(1), resume="storage", max_steps=4, rate=0.004, new=True)
    assert rates[-2:] == pytest.approx([0.001, 0.0005])
    with (
        pytest.warns(UserWarning, match="lr=0.002, but .* began with lr=0.004, .* training.use_new"),
        pytest.warns(UserWarning, match="gamma=0.1 in its StepLR, but .* has gamma=0.5, .* training.use_new"),
        pytest.raises(SystemExit),
    ):
        script(SystemExit(0), resume="storage", rate=0.002, factor=0.1)
    assert steps == [2, 2, 4, 4] and not list(tmp_path.glob("storage/*/*"))


def test_other_data(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another batch size or dataset, the epoch goes on after the samples used, and a warning says what changes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rows, seen = dataset(), list[list[int]]()

    def note(trainer: Any, stop: int | None = None) -> None:
        def noted(original: Any, model: Any, inputs: Any, *args: Any) -> Any:
            if trainer.state.global_step == stop:
                raise KeyboardInterrupt
            assert not list(tmp_path.glob("smart-infinity-*"))  # a kill would leave it
            seen.extend(inputs["input_ids"].tolist())
            return original(model, inputs, *args)

        trainer.training_step = partial(noted, trainer.training_step)

    with pytest.raises(KeyboardInterrupt):
        train(model_folder, tmp_path / "out", before=partial(note, stop=3))
    Path(tempfile.mkdtemp(prefix="smart-infinity-resume-"), "scheduler.pt").touch()  # a kill in set-up has left it
    other = shutil.copytree(tmp_path / "out", tmp_path / "other")
    for folder, batch, data, told in (
        (
            tmp_path / "out",
            4,
            rows,
            r"size=2, not 4\. .* used 6 samples .* after 4, .* the last 2 .* max_steps=6",
        ),
        (other, 2, rows[:10], r"another number of samples\. .* used 6 .* goes on after 6\. Shuffled .* leave out"),
    ):
        seen.clear()
        with pytest.warns(UserWarning, match=told):
            resumed = train(
                *(model_folder, folder),
                before=note,
                resume="storage",
                data=data,
                per_device_train_batch_size=batch,
                num_train_epochs=2,
            )
        rest = [row["input_ids"].tolist() for row in data[6 // batch * batch :]]
        assert seen[: len(rest)] == rest and resumed.trainer.state.train_batch_size == batch


def test_what_cannot_be_resumed(model_folder: Path, tmp_path: Path) -> None:
    """Without anything on storage, with settings that keep nothing, or after a fit of Lightning, an error says so."""
    with pytest.raises(StorageError, match=r"There is no optimizer state.* or leave resume_from_checkpoint out to"):
        train(model_folder, tmp_path, resume="storage")
    with pytest.raises(ConfigError, match=r"train\(resume_from_checkpoint='storage'\) resumes from storage, but"):
        train(model_folder, tmp_path, resume="storage", strategy={"transfer": {"keep": False}})
