"""A SmartInfinityTraining refuses what it cannot train, before anything is written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from lightning_smartinfinity import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.arguments import has_rule
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


def test_a_training_within_a_training() -> None:
    """The second context is refused, and the first one goes on."""
    with SmartInfinityTraining() as training:
        with pytest.raises(UnsupportedError, match="within another"), SmartInfinityTraining():
            pass
        assert training.config["zero_optimization"]["stage"] == 3
    with SmartInfinityTraining():  # it ended
        pass


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
