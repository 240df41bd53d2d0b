"""Adapters of PEFT that are merged into partitioned weights: the weights of the same calls in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import peft
import pytest
import torch
import transformers

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.huggingface.trained import adapters, arguments, dataset, load

IDS = dataset()[0]["input_ids"][None]
# ZeRO-3 keeps small parameters whole once they were gathered.
PARTITIONED = {"zero": {"stage3_param_persistence_threshold": 0}}


def merged_twice(model: Any) -> Any:
    model.merge_adapter(safe_merge=True)
    model.unmerge_adapter()
    model.merge_adapter()
    return model


def combined(model: Any) -> Any:
    model.add_weighted_adapter(["default"], [0.5], "mixture")
    model.set_adapter("mixture")
    return model


def unloaded(model: Any) -> Any:
    return model.merge_and_unload()


def outcome(
    change: Callable[[Any], Any], folder: Path, out: Path, *, ours: bool, train: bool, gathered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and the first query's weight after a change of a model with adapters."""
    with SmartInfinityTraining(out / "storage", **PARTITIONED) if ours else nullcontext() as training:
        changes: dict[str, Any] = {} if training else {"use_cpu": True}
        args = arguments(out, training and training.config, max_steps=2, learning_rate=1e-2, **changes)
        model = adapters(load(folder))
        if train:
            transformers.Trainer(model=model, args=args, train_dataset=dataset()).train()
        else:
            for name, param in model.named_parameters():
                with deepspeed.zero.GatheredParameters([param], modifier_rank=0), torch.no_grad():
                    param.fill_(0.05) if "lora_B" in name else None
        with deepspeed.zero.GatheredParameters(list(model.parameters())) if gathered else nullcontext():
            model = change(model.eval())
        query = next(param for name, param in model.named_parameters() if "q_proj" in name and "lora" not in name)
        with torch.no_grad():
            logits = model(input_ids=IDS).logits
        with deepspeed.zero.GatheredParameters([query]):
            return logits, query.detach().clone()


@pytest.mark.parametrize(
    ("change", "train", "gathered"),
    [
        (unloaded, True, True),
        (unloaded, False, False),
        (merged_twice, True, False),
        (combined, True, False),
    ],
)
def test_a_merge_is_that_in_memory(
    change: Callable[[Any], Any], train: bool, gathered: bool, model_folder: Path, tmp_path: Path
) -> None:
    """Before and after a training, gathered by the user or not, answers and weights are those in memory."""
    expected = outcome(change, model_folder, tmp_path / "memory", ours=False, train=train, gathered=False)
    found = outcome(change, model_folder, tmp_path / "ours", ours=True, train=train, gathered=gathered)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_a_merged_model_is_saved(model_folder: Path, tmp_path: Path) -> None:
    """``training.save_pretrained`` takes the model that ``merge_and_unload`` returns."""
    with SmartInfinityTraining(tmp_path / "storage", **PARTITIONED) as training:
        args = arguments(tmp_path / "out", training.config, max_steps=2, learning_rate=1e-2)
        model = adapters(load(model_folder))
        assert isinstance(model, peft.PeftModel)
        transformers.Trainer(model=model, args=args, train_dataset=dataset()).train()
        with torch.no_grad():
            expected = model.eval()(input_ids=IDS).logits
        training.save_pretrained(tmp_path / "merged", model.merge_and_unload())
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "merged")(input_ids=IDS).logits, expected, atol=1e-5, rtol=1e-5)
