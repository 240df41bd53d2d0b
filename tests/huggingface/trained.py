"""Trains a small Llama-shaped model through transformers' Trainer, and through Lightning for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.trainers import quiet_trainer

BATCH, STEPS, LENGTH, RATE = 2, 6, 12, 1e-3


def dataset(steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Return random sequences, enough for this number of batches."""
    rows = torch.randint(0, 300, (steps * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, config: dict[str, Any] | None, **changes: Any) -> transformers.TrainingArguments:
    """Return arguments of a training that takes every batch once, in order."""
    settings: dict[str, Any] = {
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": RATE,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "save_strategy": "no",
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "disable_tqdm": True,
        "deepspeed": config,
    }
    return transformers.TrainingArguments(str(folder), **{**settings, **changes})


def load(folder: Path) -> Any:
    """Load the model in fp32."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def judge(folder: Path) -> Any:
    """Load the model as one that rates texts, with a random head, in fp32."""
    torch.manual_seed(3)
    classes = transformers.AutoModelForSequenceClassification
    return classes.from_pretrained(folder, dtype=torch.float32, num_labels=1, pad_token_id=1)


def adapters(model: Any) -> Any:
    """Return the model with LoRA adapters, and all else frozen."""
    import peft

    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))


def calling(**hooks: Callable[..., None]) -> transformers.TrainerCallback:
    """Return a callback of a class whose hooks call these functions."""
    methods = {name: staticmethod(hook) for name, hook in hooks.items()}
    return type("Calling", (transformers.TrainerCallback,), methods)()  # type: ignore[no-any-return]


@dataclass
class Loss:
    """The mean cross-entropy of next tokens, and what it was in every call.

    Args:
        divisor: Number by which the loss that is returned is divided.
    """

    divisor: int = 1
    values: list[float] = field(default_factory=list)

    def __call__(self, outputs: Any, labels: torch.Tensor, **_: Any) -> torch.Tensor:
        logits = outputs.logits[:, :-1].float().flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
        self.values.append(loss.item())
        return loss / self.divisor


@dataclass
class Outcome:
    """Holds what a training leaves behind.

    Attributes:
        losses: The loss of every micro-batch.
        trainer: The Trainer.
        weights: Weights by name, as saved for ``from_pretrained``.
    """

    losses: list[float]
    trainer: Any
    weights: dict[str, torch.Tensor]


def train(
    model: Path,
    out: Path,
    *,
    wrap: Callable[[Any], Any] = lambda model: model,
    before: Callable[[Any], object] = lambda trainer: None,
    resume: Path | str | bool | None = None,
    strategy: dict[str, Any] | None = None,
    data: list[dict[str, torch.Tensor]] | None = None,
    **changes: Any,
) -> Outcome:
    """Train through ``transformers.Trainer`` in a :class:`SmartInfinityTraining`.

    Args:
        model: Folder of the model.
        out: ``output_dir``.
        wrap: Function that is applied to the model.
        before: Function that is called with the Trainer before it trains.
        resume: ``resume_from_checkpoint``.
        strategy: Settings of :class:`SmartInfinityTraining`.
        data: The training data.
        **changes: Further ``TrainingArguments``.
    """
    loss = Loss(divisor=changes.get("gradient_accumulation_steps", 1))
    with SmartInfinityTraining(**(strategy or {})) as training:
        args = arguments(out, training.config, **changes)
        trainer = transformers.Trainer(
            model=wrap(load(model)),
            args=args,
            train_dataset=dataset() if data is None else data,
            eval_dataset=dataset(2),
            compute_loss_func=loss,
        )
        before(trainer)
        loss.values.clear()
        trainer.train(resume_from_checkpoint=str(resume) if isinstance(resume, Path) else resume)
        trainer.save_model(str(out / "saved"))
    return Outcome(loss.values, trainer, weights_in(out / "saved"))


@cache
def straight(model: Path) -> Outcome:
    """Return the outcome of a training with the default settings, which is run once."""
    with TemporaryDirectory() as out:
        return train(model, Path(out))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a folder that transformers can load, or of adapters."""
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return dict(load_file(file))


class LitModel(pl.LightningModule):
    """The same training in Lightning: the groups, the optimizer and the schedule of ``transformers.Trainer``."""

    def __init__(self, folder: Path, steps: int) -> None:
        super().__init__()
        self.model = load(folder)
        self.loss, self._steps = Loss(), steps

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        return self.loss(self.model(input_ids=batch["input_ids"]), batch["labels"])

    def configure_optimizers(self) -> Any:
        # The Trainer decays every weight except those of norms and biases.
        named = list(self.model.named_parameters())
        decayed = [param for name, param in named if "norm" not in name]
        others = [param for name, param in named if "norm" in name]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
        schedule = transformers.get_scheduler("linear", optimizer, 0, num_training_steps=self._steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        return DataLoader(dataset(), batch_size=BATCH)


def train_in_lightning(
    model: Path, out: Path, *, precision: str = "32-true", accumulate: int = 1
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the weights of the training in Lightning."""
    module = LitModel(model, STEPS // accumulate)
    strategy = SmartInfinityStrategy(out / "storage")
    trainer = quiet_trainer(
        out,
        strategy,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=1.0,
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,  # it would shuffle
    )
    trainer.fit(module)
    strategy.save_pretrained(out / "saved")
    return module.loss.values, weights_in(out / "saved")
