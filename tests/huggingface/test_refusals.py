"""A SmartInfinityTraining refuses what it cannot train, before anything is written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_smartinfinity import ConfigError, UnsupportedError
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.integrations.transformers.arguments import has_rule
from tests.huggingface.trained import adapters, arguments, dataset, load, train


def test_a_cpu_that_is_asked_for_by_name(tmp_path: Path) -> None:
    """``use_cpu=True`` would switch DeepSpeed off without a word."""
    with SmartInfinityTraining() as training, pytest.raises(UnsupportedError, match=r"use_cpu=True.*Leave it out"):
        arguments(tmp_path, training.config, use_cpu=True)


def test_batch_sizes_that_are_tried(tmp_path: Path) -> None:
    """Transformers would refuse ``auto_find_batch_size`` with ZeRO-3, and recommend other stages, which do not help."""
    with SmartInfinityTraining() as training, pytest.raises(UnsupportedError, match="Set per_device_train_batch_size"):
        arguments(tmp_path, training.config, auto_find_batch_size=True)


@pytest.mark.parametrize("name", ["paged_adamw_8bit", "adamw_bnb_8bit", "adafactor", "galore_adamw"])
def test_an_optimizer_that_keeps_its_state_in_memory(name: str, tmp_path: Path) -> None:
    """Paged and 8-bit optimizers, and others without an update rule, are refused by the name that was typed."""
    with SmartInfinityTraining() as training, pytest.raises(UnsupportedError, match=f"{name}.*adamw_torch"):
        arguments(tmp_path, training.config, optim=name)


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


def test_another_configuration_of_deepspeed(tmp_path: Path) -> None:
    """A configuration that is not the training's own is refused with the way to change it."""
    with SmartInfinityTraining() as training:
        for other in ({"zero_optimization": {"stage": 2}}, {**training.config, "zero_optimization": {"stage": 3}}):
            with pytest.raises(ConfigError, match=r"deepspeed=training\.config"):
                arguments(tmp_path, other)


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


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_an_optimizer_of_deepspeed(section: str, tmp_path: Path) -> None:
    """A section of the configuration would build DeepSpeed's own Adam, which it compiles."""
    with SmartInfinityTraining() as training, pytest.raises(ConfigError, match=f"{section}.*Leave it out"):
        arguments(tmp_path, {**training.config, section: {"type": "AdamW", "params": {"lr": "auto"}}})


def test_an_error_in_the_training_ends_the_context_cleanly(model_folder: Path, tmp_path: Path) -> None:
    """The error arrives, state leaves the storage, and the next training works."""

    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        train(model_folder, tmp_path / "a", before=lambda trainer: trainer.add_callback(Stop()))
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
