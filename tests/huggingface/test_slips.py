"""People who forget a part of SmartInfinityTraining get an answer before anything trains without it."""

from __future__ import annotations

import os
import pickle
import shlex
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import DeepSpeedPlugin

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.huggingface.trained import arguments, calling, dataset, load, train


def trainer_of(folder: Path, out: Path, config: Any, **changes: Any) -> transformers.Trainer:
    """Return a Trainer with arguments of its own."""
    args = arguments(out, config, **changes)
    return transformers.Trainer(model=load(folder), args=args, train_dataset=dataset(2), eval_dataset=dataset(2))


def test_the_context_is_forgotten(tmp_path: Path) -> None:
    """The configuration is given within the context only: DeepSpeed would take it for a training of its own."""
    training = SmartInfinityTraining()
    with pytest.raises(UnsupportedError, match=r"outside of the `with`.*as training:"):
        _ = training.config
    with training:
        assert training.config["zero_optimization"]["stage"] == 3
    with pytest.raises(UnsupportedError, match="outside of the `with`"):
        _ = training.config


def test_the_configuration_is_forgotten(model_folder: Path, tmp_path: Path) -> None:
    """A Trainer or an Accelerator that would train in memory is refused when it is made."""
    with SmartInfinityTraining():
        with pytest.raises(UnsupportedError, match=r"deepspeed=training\.config"):
            trainer_of(model_folder, tmp_path, None)
        with pytest.raises(UnsupportedError, match=r"DeepSpeedPlugin\(hf_ds_config=training\.config\)"):
            accelerate.Accelerator()


@pytest.mark.parametrize(
    ("name", "trained"), [("train", False), ("evaluate", True), ("predict", False), ("save_model", True)]
)
def test_a_trainer_is_used_after_the_context(name: str, trained: bool, model_folder: Path, tmp_path: Path) -> None:
    """The methods of such a Trainer say so, also within another context; its model can still be saved."""
    with SmartInfinityTraining() as training:
        trainer = trainer_of(model_folder, tmp_path / "out", training.config)
        if trained:
            trainer.train()
    values = {"predict": [dataset(1)], "save_model": [str(tmp_path / "late")]}.get(name, [])
    with pytest.raises(UnsupportedError, match=rf"Trainer\.{name} was called after .* ended\. Call it within"):
        getattr(trainer, name)(*values)
    with SmartInfinityTraining(), pytest.raises(UnsupportedError, match="after its SmartInfinityTraining had ended"):
        getattr(trainer, name)(*values)
    assert not (tmp_path / "late").exists()
    if trained:
        training.save_pretrained(tmp_path / "saved")
        assert all(value.isfinite().all() for value in load(tmp_path / "saved").state_dict().values())


def test_two_trainers_share_arguments(model_folder: Path, tmp_path: Path) -> None:
    """The second one is refused by name."""
    with SmartInfinityTraining() as training:
        args = arguments(tmp_path, training.config)
        transformers.Trainer(model=load(model_folder), args=args, train_dataset=dataset(2))
        with pytest.raises(UnsupportedError, match="Make new TrainingArguments for each Trainer"):
            transformers.Trainer(model=load(model_folder), args=args, train_dataset=dataset(2))


def test_other_arguments_are_made_before_a_training(model_folder: Path, tmp_path: Path) -> None:
    """Accelerate would train the first Trainer by the arguments of the second. The second one trains."""
    with SmartInfinityTraining() as training:
        first = trainer_of(model_folder, tmp_path / "first", training.config)
        second = trainer_of(model_folder, tmp_path / "second", training.config, gradient_accumulation_steps=2)
        with pytest.raises(UnsupportedError, match="Other TrainingArguments were made after this Trainer"):
            first.train()
        second.train()
        assert not (tmp_path / "first" / "smart_infinity").exists()


def test_an_accelerator_with_the_configuration(tmp_path: Path) -> None:
    """It is taken."""
    with SmartInfinityTraining() as training:
        plugin = DeepSpeedPlugin(hf_ds_config={**training.config, "train_micro_batch_size_per_gpu": 1})
        assert accelerate.Accelerator(deepspeed_plugin=plugin).distributed_type == "DEEPSPEED"


def test_a_checkpoint_that_is_opened_as_a_file(model_folder: Path, tmp_path: Path) -> None:
    """The note in it names ways that work for a checkpoint of a Trainer of transformers."""
    train(model_folder, tmp_path, data=dataset(2), save_strategy="steps", save_steps=2)
    checkpoint = tmp_path / "checkpoint-2"
    with pytest.raises(IsADirectoryError):
        torch.load(checkpoint)
    text = (checkpoint / NOTE_NAME).read_text()
    assert "resume_from_checkpoint" in text and "ckpt_path" not in text
    for number, line in enumerate(line for line in text.splitlines() if line.startswith("    ")):
        name, command, source, *rest = shlex.split(line)
        assert (name, command, source) == ("smart-infinity", "export", str(checkpoint))
        assert main([command, source, str(tmp_path / f"export-{number}"), *rest[1:]]) == 0
    expected = load(checkpoint).state_dict()
    assert all(torch.equal(expected[key], value) for key, value in load(tmp_path / "export-0").state_dict().items())


def test_a_checkpoint_is_resumed_without_the_context(model_folder: Path, tmp_path: Path) -> None:
    """A Trainer in memory would begin with new moments, without a word. Its error names where to resume."""
    train(model_folder, tmp_path, data=dataset(2), save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "checkpoint-1"
    with pytest.raises(pickle.UnpicklingError, match="resume_within_smart_infinity_training"):
        trainer_of(model_folder, tmp_path, None).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(UnsupportedError, match=r"checkpoint-1 .*Resume within it, with TrainingArguments"):
        torch.load(checkpoint / "optimizer.pt", weights_only=False)
    trainer_of(model_folder, tmp_path, None, save_strategy="steps", save_steps=1).train()
    assert "param_groups" in torch.load(checkpoint / "optimizer.pt"), "a Trainer in memory could not save there"
    train(model_folder, tmp_path, data=dataset(2), resume=checkpoint.with_name("checkpoint-2"))


def test_a_checkpoint_of_a_model_alone(model_folder: Path, tmp_path: Path) -> None:
    """With ``save_only_model`` there is no optimizer, and nothing is in the way of a Trainer in memory."""
    train(model_folder, tmp_path, data=dataset(2), save_strategy="steps", save_steps=2, save_only_model=True)
    assert not (tmp_path / "checkpoint-2" / "optimizer.pt").exists()


def test_another_trainer_evaluates_the_model_in_the_middle_of_a_training(model_folder: Path, tmp_path: Path) -> None:
    """It would take the model away from the training, and is refused."""

    def evaluate(*_: Any, model: Any, **__: Any) -> None:
        args = arguments(tmp_path / "other", training.config)
        transformers.Trainer(model=model, args=args, eval_dataset=dataset(1)).evaluate()

    with SmartInfinityTraining() as training:
        trainer = trainer_of(model_folder, tmp_path, training.config)
        trainer.add_callback(calling(on_step_end=evaluate))
        with pytest.raises(UnsupportedError, match="is being fitted by another Trainer"):
            trainer.train()


def test_the_environment_is_as_before(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's variables, which a training changes, and the launcher's are not left behind."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = dict(os.environ)
    train(model_folder, tmp_path, data=dataset(2), gradient_accumulation_steps=2)
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    assert not {name for name in changed if name.startswith("ACCELERATE_") or "RANK" in name or "MASTER" in name}
