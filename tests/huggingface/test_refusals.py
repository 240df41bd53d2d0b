"""A SmartInfinityTraining refuses what it cannot train, and says so to people who forget a part of it."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import torch.distributed as dist
import transformers
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity import CheckpointError, ConfigError, UnsupportedError
from lightning_smartinfinity.checkpoint_hint import NOTE_NAME
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.arguments import has_rule
from lightning_smartinfinity.integrations.transformers.launch import launched
from lightning_smartinfinity.settings.options import OF_TRANSFORMERS
from tests.huggingface.trained import adapters, arguments, calling, dataset, load, train


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        ({"use_cpu": True}, UnsupportedError, r"use_cpu=True.*Leave it out"),  # it would switch DeepSpeed off
        ({"auto_find_batch_size": True}, UnsupportedError, "Set per_device_train_batch_size"),
        *(
            ({"optim": name}, UnsupportedError, f"{name}.*adamw_torch")
            for name in ("paged_adamw_8bit", "adamw_bnb_8bit", "adafactor", "galore_adamw")
        ),
    ],
)
def test_arguments(changes: dict[str, Any], error: type[Exception], named: str, tmp_path: Path) -> None:
    """Arguments that would train in memory, or without an update rule, are refused by the name that was typed."""
    with SmartInfinityTraining() as training, pytest.raises(error, match=named):
        arguments(tmp_path, training.config, **changes)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (lambda config: SmartInfinityTraining(), r"Pass deepspeed=training\.config"),
        (lambda config: "smart_infinity", r"Pass deepspeed=training\.config"),
        (lambda config: True, r"Pass deepspeed=training\.config"),
        (lambda config: {"zero_optimization": {"stage": 2}}, r"deepspeed=training\.config"),
        (lambda config: {**config, "zero_optimization": {"stage": 3}}, r"deepspeed=training\.config"),
        (lambda config: {**config, "optimizer": {"type": "AdamW"}}, "optimizer.*Leave it out"),
        (lambda config: {**config, "scheduler": {"type": "WarmupLR"}}, "scheduler.*Leave it out"),
        (
            lambda config: {**config, "gradient_accumulation_steps": 4},
            r"'gradient_accumulation_steps' .* set to 4.*TrainingArguments",
        ),
    ],
)
def test_another_configuration(given: Callable[[Any], Any], named: str, tmp_path: Path) -> None:
    """What is not the training's own configuration, or has values that TrainingArguments decide, is refused."""
    with SmartInfinityTraining() as training, pytest.raises(ConfigError, match=named):
        arguments(tmp_path, given(training.config), gradient_accumulation_steps=4)


def test_the_optimizers_that_are_taken() -> None:
    """TrainingArguments know many names; those of torch's own optimizers with an update rule are taken."""
    names = {name.value for name in transformers.training_args.OptimizerNames}
    same = {name.lower() for name in torch.optim.__all__} & names
    assert {name for name in names if has_rule(name)} == {"adamw_torch", "adamw_torch_fused", *same} - {"adafactor"}


@pytest.mark.parametrize("attribute", ["hf_quantizer", "is_quantized"])
def test_a_quantized_base(attribute: str, model_folder: Path, tmp_path: Path) -> None:
    """A model in 4 bits, below adapters, is refused by name; nothing lies on storage.

    No quantizer of transformers runs here: the model is marked after the Trainer has looked at it.
    """

    def quantize(trainer: Any) -> None:
        setattr(trainer.model.get_base_model(), attribute, True)

    with pytest.raises(UnsupportedError, match="quantized weights"):
        train(model_folder, tmp_path, wrap=adapters, before=quantize)
    assert not list(tmp_path.rglob("*.bin"))


def test_without_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the extra to install."""
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with (
        pytest.raises(ConfigError, match=r"accelerate.*pip install '\.\[huggingface\]'"),
        SmartInfinityTraining(),
    ):
        pass


def test_an_error_in_the_training_ends_the_context_cleanly(model_folder: Path, tmp_path: Path) -> None:
    """The error arrives, state leaves the storage, and the next training works."""
    stop = calling(on_step_end=mock.Mock(side_effect=RuntimeError("stop here")))
    with pytest.raises(RuntimeError, match="stop here"):
        train(model_folder, tmp_path / "a", before=lambda trainer: trainer.add_callback(stop))
    assert not list((tmp_path / "a" / "smart_infinity").iterdir())
    assert train(model_folder, tmp_path / "b", data=dataset(2)).weights


def test_saving_by_the_model_itself_names_the_way(model_folder: Path, tmp_path: Path) -> None:
    """``model.save_pretrained`` would write empty tensors: it raises instead."""
    with SmartInfinityTraining(zero={"stage3_param_persistence_threshold": 0}) as training:
        args = arguments(tmp_path, training.config)
        trainer = transformers.Trainer(model=load(model_folder), args=args, train_dataset=dataset(2))
        trainer.train()
        with pytest.raises(UnsupportedError, match="save_pretrained"):
            trainer.model.save_pretrained(tmp_path / "lost")
        assert not list((tmp_path / "lost").glob("*.safetensors"))
        training.save_pretrained(tmp_path / "kept")
    assert torch.isfinite(load(tmp_path / "kept").lm_head.weight).all()


def test_adapters_that_are_saved_before_training(model_folder: Path, tmp_path: Path) -> None:
    """The Trainer gathers adapters by its engine, which it does not have yet."""
    with SmartInfinityTraining() as training:
        args = arguments(tmp_path, training.config)
        trainer = transformers.Trainer(model=adapters(load(model_folder)), args=args, eval_dataset=dataset(2))
        with pytest.raises(UnsupportedError, match=r"save_model was called before PeftModel.*Trainer.evaluate first"):
            trainer.save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved").exists()
        trainer.evaluate()
        trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_model.safetensors").is_file()


def test_several_processes_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would give every process the same batches."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UnsupportedError, match="WORLD_SIZE=2"), SmartInfinityTraining():
        pass


def trainer_of(folder: Path, out: Path, config: Any, **changes: Any) -> transformers.Trainer:
    """Return a Trainer with arguments of its own."""
    args = arguments(out, config, **changes)
    return transformers.Trainer(model=load(folder), args=args, train_dataset=dataset(2), eval_dataset=dataset(2))


def test_the_context_is_forgotten() -> None:
    """The configuration is given within the context only: DeepSpeed would take it for a training of its own.

    A second context within it is refused, and the first one goes on; one after it is not.
    """
    training = SmartInfinityTraining()
    with pytest.raises(UnsupportedError, match=r"outside of the `with`.*as training:"):
        _ = training.config
    with training:
        with pytest.raises(UnsupportedError, match="within another"), SmartInfinityTraining():
            pass
        assert training.config["zero_optimization"]["stage"] == 3
    with SmartInfinityTraining(), pytest.raises(UnsupportedError, match="outside of the `with`"):
        _ = training.config


def test_the_configuration_is_forgotten(model_folder: Path, tmp_path: Path) -> None:
    """A Trainer or an Accelerator that would train in memory is refused when it is made."""
    with SmartInfinityTraining():
        with pytest.raises(UnsupportedError, match=r"deepspeed=training\.config"):
            trainer_of(model_folder, tmp_path, None)
        with pytest.raises(UnsupportedError, match=r"DeepSpeedPlugin\(hf_ds_config=training\.config\)"):
            accelerate.Accelerator()


@pytest.mark.parametrize("trained", [False, True])
def test_a_trainer_is_used_after_the_context(trained: bool, model_folder: Path, tmp_path: Path) -> None:
    """The methods of such a Trainer say so, also within another context; its model can still be saved."""
    with SmartInfinityTraining() as training:
        trainer = trainer_of(model_folder, tmp_path / "out", training.config)
        if trained:
            trainer.train()
    values = {"train": [], "evaluate": [], "predict": [dataset(1)], "save_model": [str(tmp_path / "late")]}
    for name, given in values.items():
        with pytest.raises(UnsupportedError, match=rf"Trainer\.{name} was called after .* ended\. Call it within"):
            getattr(trainer, name)(*given)
        with (
            SmartInfinityTraining(),
            pytest.raises(UnsupportedError, match="after its SmartInfinityTraining had ended"),
        ):
            getattr(trainer, name)(*given)
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


def test_a_checkpoint_is_resumed_without_the_context(model_folder: Path, tmp_path: Path) -> None:
    """A Trainer in memory would begin with new moments, without a word. Its error names where to resume.

    What it saves into a checkpoint of ours makes a mixture of two trainings, which is refused. The note in a checkpoint
    that is opened as a file names what loads it, and commands that export it.
    """
    train(model_folder, tmp_path, data=dataset(2), save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "checkpoint-1"
    with pytest.raises(IsADirectoryError):
        torch.load(checkpoint)
    text = (checkpoint / NOTE_NAME).read_text()
    assert (
        "resume_from_checkpoint" in text
        and "ckpt_path" not in text
        and f"    smart-infinity export {checkpoint} " in text
    )
    with pytest.raises(pickle.UnpicklingError, match="resume_within_smart_infinity_training"):
        trainer_of(model_folder, tmp_path, None).train(resume_from_checkpoint=str(checkpoint))
    with pytest.raises(UnsupportedError, match=r"checkpoint-1 .*Resume within it, with TrainingArguments"):
        torch.load(checkpoint / "optimizer.pt", weights_only=False)
    trainer_of(model_folder, tmp_path, None, save_strategy="steps", save_steps=1).train()
    assert "param_groups" in torch.load(checkpoint / "optimizer.pt"), "a Trainer in memory could not save there"
    with pytest.raises(CheckpointError, match="another program changed it after the save"):
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


def test_scripts_that_start_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """None chooses a port before it opens it, which another script could open in between."""
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with launched():
        assert os.environ["MASTER_PORT"] == "0"
        stores = [next(dist.rendezvous("env://"))[0] for _ in range(2)]
        assert stores[0].port != stores[1].port


def test_the_environment_is_as_before(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training restores the environment variables of Accelerate and of the launcher."""
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "3")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    before = dict(os.environ)
    train(model_folder, tmp_path, data=dataset(2), gradient_accumulation_steps=2)
    changed = {name for name in before.keys() | os.environ.keys() if before.get(name) != os.environ.get(name)}
    assert not {name for name in changed if name.startswith("ACCELERATE_") or "RANK" in name or "MASTER" in name}


STOCK = sorted(
    {name for stock in (DeepSpeedStrategy, FabricDeepSpeedStrategy) for name in inspect.signature(stock).parameters}
)


ARGUMENTS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def answer_to(**options: Any) -> str:
    """Return the remedy of the error, which has to name the class and the option."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityTraining(**options)
    assert caught.value.problem.startswith("SmartInfinityTraining") and next(iter(options)) in caught.value.problem
    return caught.value.remedy


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bf16": True}, "Pass TrainingArguments(bf16=True)."),
        ({"fp16": True}, "Pass TrainingArguments(fp16=True)."),
        ({"output_dir": "run"}, "Pass TrainingArguments(output_dir='run')."),
        ({"per_device_train_batch_size": 2}, "Pass TrainingArguments(per_device_train_batch_size=2)."),
        ({"gradient_checkpointing": True}, "Pass TrainingArguments(gradient_checkpointing=True)."),
        ({"deepspeed": "ds.json"}, "Pass TrainingArguments(deepspeed=training.config)"),
        ({"gradient_clip_val": 0.5}, "Pass TrainingArguments(max_grad_norm=0.5)."),
        ({"accumulate_grad_batches": 4}, "Pass TrainingArguments(gradient_accumulation_steps=4)."),
        ({"precision": "bf16-mixed"}, "Pass TrainingArguments(bf16=True)"),
        ({"precision_plugin": None}, "Pass TrainingArguments(bf16=True)"),
        ({"timeout": 30}, "Pass TrainingArguments(ddp_timeout=...), in seconds"),
        ({"config": "ds.json"}, "max_grad_norm, gradient_accumulation_steps"),
        ({"remote_device": "nvme"}, "from_pretrained partitions a model as it is loaded"),
        ({"parallel_devices": []}, "torchrun"),
        ({"cluster_environment": None}, "torchrun"),
        ({"accelerator": "gpu"}, "runs on GPUs where there are any"),
        ({"loss_scale": 128}, "DeepSpeed finds the scale of the loss itself"),
        ({"process_group_backend": "nccl"}, "NCCL"),
        ({"exclude_frozen_parameters": True}, "the adapters alone"),
        ({"load_full_weights": True}, "from_pretrained loads whole weights"),
        ({"offload_optimizer": True}, "is always in the folders of storage=..."),
        ({"nvme_path": "/nvme"}, "Pass storage='/nvme'"),
        ({"stages": 3}, "Did you mean 'stage'? Leave it out"),
        ({"time_out": 30}, "Did you mean 'timeout'? Pass TrainingArguments(ddp_timeout=...)"),
        ({"devices": 2}, "torchrun"),
        ({"storag": "x"}, "Did you mean 'storage'?"),
        ({"storage": "s3://bucket/run"}, "Pass a local folder on a drive of this machine."),
        ({"storage": ["a", "gs://bucket/run"]}, "Pass a local folder on a drive of this machine."),
        ({"num_bufers": 8}, "Did you mean transfer={'num_buffers': ...}?"),
    ],
)
def test_an_option_of_something_else(options: dict[str, Any], words: str) -> None:
    """The answer says where the option belongs."""
    assert words in answer_to(**options)


@pytest.mark.parametrize("name", STOCK)
def test_an_option_of_stock_deepspeed(name: str) -> None:
    """Each option of Lightning's class has an answer of its own, which speaks of nothing that only Lightning has."""
    answer = answer_to(**{name: True})
    assert re.match("Leave it out|Pass|Call", answer)
    assert not re.search(r"Lightning|Fabric|\bTrainer\(|configure_model|strategy", answer)


def test_arguments_that_are_named_exist() -> None:
    """Every field of TrainingArguments that an answer names is one of the installed version."""
    named = {name for remedy in OF_TRANSFORMERS.values() for name in re.findall(r"TrainingArguments\((\w+)=", remedy)}
    listed = {"bf16", "max_grad_norm", "gradient_accumulation_steps", "per_device_train_batch_size"}
    assert named | listed <= ARGUMENTS and all(name in OF_TRANSFORMERS["config"] for name in listed)


def test_a_configuration_that_was_changed_in_an_earlier_training(tmp_path: Path) -> None:
    """It is refused, and the next training has a configuration of its own."""
    with SmartInfinityTraining() as training:
        training.config["fp16"]["initial_scale_power"] = 10
        with pytest.raises(ConfigError, match=r"'fp16' of SmartInfinityTraining\.config was set"):
            arguments(tmp_path, training.config)
    with SmartInfinityTraining() as training:
        assert training.config["fp16"] == {"enabled": "auto"}
        arguments(tmp_path, training.config)
