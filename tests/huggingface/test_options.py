"""Options that SmartInfinityTraining does not have are answered with what transformers' users write, in one hop."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from lightning.fabric.strategies.deepspeed import DeepSpeedStrategy as FabricDeepSpeedStrategy
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity import ConfigError
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.settings.options import OF_TRANSFORMERS
from tests.helpers.fresh_python import fresh_python
from tests.huggingface.trained import arguments

STOCK = sorted(
    {name for stock in (DeepSpeedStrategy, FabricDeepSpeedStrategy) for name in inspect.signature(stock).parameters}
)
ARGUMENTS = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}


def answer_to(**options: Any) -> str:
    """Return the remedy of the error, which has to name the class and the option."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityTraining(**options)
    assert caught.value.problem.startswith("SmartInfinityTraining")
    assert next(iter(options)) in caught.value.problem
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
    assert named | listed <= ARGUMENTS
    assert all(name in OF_TRANSFORMERS["config"] for name in listed)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options are answered all the same, as far as that needs no look at TrainingArguments."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert answer_to(gradient_clip_val=0.5) == "Pass TrainingArguments(max_grad_norm=0.5)."
    assert "Settings of ZeRO-3 go into zero={...}" in answer_to(bf16=True)


@pytest.mark.long
def test_transformers_is_imported_for_wrong_options_only(tmp_path: Path) -> None:
    """It takes seconds, and settings need none of it. DeepSpeed is not imported for either."""
    code = """
    import sys
    from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
    SmartInfinityTraining("nvme")
    print("transformers" in sys.modules)
    try:
        SmartInfinityTraining(bf16=True)
    except ValueError as error:
        print(error, "deepspeed" in sys.modules)
    """
    first, second = fresh_python(code, cwd=tmp_path).splitlines()[-2:]
    assert (first, second[-5:]) == ("False", "False")
    assert "TrainingArguments(bf16=True)" in second


@pytest.mark.parametrize("settings", [{"storage": "s3://bucket/run"}, {"storage": ["a", "gs://bucket/run"]}])
def test_a_url_as_storage(settings: dict[str, Any]) -> None:
    """It would be a local folder of a strange name."""
    assert answer_to(**settings) == "Pass a local folder on a drive of this machine."


def test_a_configuration_that_was_changed_in_an_earlier_training(tmp_path: Path) -> None:
    """It is refused, and the next training has a configuration of its own."""
    with SmartInfinityTraining() as training:
        training.config["fp16"]["initial_scale_power"] = 10
        with pytest.raises(ConfigError, match=r"'fp16' of SmartInfinityTraining\.config was set"):
            arguments(tmp_path, training.config)
    with SmartInfinityTraining() as training:
        assert training.config["fp16"] == {"enabled": "auto"}
        arguments(tmp_path, training.config)
