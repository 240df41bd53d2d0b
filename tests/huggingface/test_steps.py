"""Steps are taken by ``optimizer.step()``, so that code behind backward finds what it finds in memory."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.huggingface.trained import Loss, arguments, calling, dataset, load


class Plain(transformers.Trainer):
    """A Trainer that notes what its training steps and its callbacks see."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: list[float] = []

    def see_gradients(self) -> None:
        gradients = [param.grad for param in self.model.parameters() if param.grad is not None]
        self.seen.append(float(torch.nn.utils.get_total_norm(gradients)))

    def see_weights(self) -> None:
        self.seen += [float(param.detach().norm()) for param in (self.embedding, self.model.lm_head.weight)]

    @property
    def embedding(self) -> Any:
        return self.model.get_input_embeddings().weight


class Reading(Plain):
    """Reads the gradients of each micro-batch, and changes one."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.see_gradients()
        self.model.lm_head.weight.grad.mul_(1.5)
        return loss


class Adversarial(Plain):
    """Adds the gradients at perturbed weights to those at the weights (FGM)."""

    def training_step(self, model: Any, inputs: Any, num_items: Any = None) -> torch.Tensor:
        loss = super().training_step(model, inputs, num_items)
        before, gradient = self.embedding.data.clone(), self.embedding.grad.clone()
        self.embedding.data.add_(0.5 * gradient / gradient.norm())
        self.accelerator.backward(self.compute_loss(model, inputs, num_items_in_batch=num_items))
        self.embedding.data.copy_(before)
        self.see_gradients()
        return loss


class Dropping(Plain):
    """Drops the gradients of a window."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 1:
            self.optimizer.zero_grad()
        return loss


def watch(trainer: Plain, *, before: bool = False, factor: float = 1.0) -> None:
    """See weights after each step, gradients and weights before it, too, and make the clipped gradients larger."""

    def see(*_: Any, **__: Any) -> None:
        trainer.see_weights()

    def see_before(*_: Any, **__: Any) -> None:
        trainer.see_gradients()
        trainer.see_weights()
        for param in trainer.model.parameters():
            if param.grad is not None and factor != 1.0:
                param.grad.mul_(factor)

    hooks = {"on_optimizer_step": see, "on_step_end": see}
    trainer.add_callback(calling(**hooks, **({"on_pre_optimizer_step": see_before} if before else {})))


@pytest.mark.parametrize(
    ("kind", "accumulate", "clip", "watched"),
    [
        (Reading, 2, 0.1, {"before": True}),
        (Adversarial, 1, 0.1, {"before": True, "factor": 3.0}),
        (Dropping, 1, 0.1, {"before": True, "factor": 3.0}),
    ],
)
def test_code_between_backward_and_step(
    kind: type[Plain], accumulate: int, clip: float, watched: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    """What it reads and writes, losses, logged norms and rates are those in memory, also with updates in backward."""

    def outcome(folder: Path, config: dict[str, Any] | None) -> tuple[list[float], list[float], list[float]]:
        args = arguments(folder, config, gradient_accumulation_steps=accumulate, max_grad_norm=clip)
        loss = Loss(divisor=accumulate)
        trainer = kind(model=load(model_folder), args=args, train_dataset=dataset(), compute_loss_func=loss)
        watch(trainer, **watched)
        trainer.train()
        logged = [
            log[name] for log in trainer.state.log_history for name in ("grad_norm", "learning_rate") if name in log
        ]
        return loss.values, trainer.seen, logged

    losses, seen, logged = outcome(tmp_path / "memory", None)
    with SmartInfinityTraining(overlap="backward") as training:
        ours = outcome(tmp_path / "storage", training.config)
    assert (
        seen
        and len(set(logged)) > 2
        and ours[0] == pytest.approx(losses, abs=1e-5)
        and ours[1] == pytest.approx(seen, rel=1e-5)
        and ours[2] == pytest.approx(logged, rel=1e-5)
    )


class Spoilt(Plain):
    """Spoils the gradients of the second step."""

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 1:
            self.embedding.grad.fill_(torch.inf)
        return loss


def test_a_step_that_is_skipped(model_folder: Path, tmp_path: Path) -> None:
    """Its norm is logged, the schedule stays where it is, and weights are those before."""
    with SmartInfinityTraining(overlap="backward") as training:
        trainer: Any = Spoilt(load(model_folder), arguments(tmp_path, training.config), train_dataset=dataset(3))
        watch(trainer)
        with pytest.warns(match="A step was skipped"):
            trainer.train()
    logs = [log for log in trainer.state.log_history if "grad_norm" in log]
    assert [math.isfinite(log["grad_norm"]) for log in logs] == [True, False, True]
    assert logs[1]["learning_rate"] == logs[2]["learning_rate"] < logs[0]["learning_rate"]
    first, second, third = trainer.seen[2:4], trainer.seen[6:8], trainer.seen[10:12]
    assert first == second != third
