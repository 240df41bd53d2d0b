"""User code that touches partitioned parameters and their gradients behaves as in memory, through each door."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityFabricStrategy, SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from tests.helpers.plain import assert_alike
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import quiet_trainer
from tests.training.everyday_code import (
    Touched,
    after_step,
    batches,
    between_backward_and_step,
    loss_of,
    make_optimizer,
    sums,
)


class LitTouched(Touched, pl.LightningModule):
    """Runs the tables in hooks of Lightning."""

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.build()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return make_optimizer(self)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return loss_of(self, self.net, batch, index)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        between_backward_and_step(self, self.global_step)

    def on_train_batch_end(self, outputs: object, batch: torch.Tensor, index: int) -> None:
        after_step(self, index)

    def train_dataloader(self) -> Any:
        return DataLoader(batches(self.terms), batch_size=None)  # type: ignore[arg-type]


def by_lightning(
    root: Path, options: dict[str, Any] | None, *, terms: bool = False, late: bool = False, devices: int = 1
) -> list[Any]:
    strategy: Any = "auto" if options is None else SmartInfinityStrategy(root / "storage", **options)
    module = LitTouched(terms=terms, late=late)
    trainer = quiet_trainer(
        root, strategy, precision="32-true", max_epochs=1, devices=devices, use_distributed_sampler=False
    )
    trainer.fit(module)
    module.seen.append(sums(module))
    if options is not None:
        strategy.close()
    return module.seen


def by_fabric(
    root: Path, options: dict[str, Any] | None, *, terms: bool = False, late: bool = False, devices: int = 1
) -> list[Any]:
    """Run the tables in a loop of Fabric, on the wrapper that it returns."""
    strategy: Any = "auto" if options is None else SmartInfinityFabricStrategy(root / "storage", **options)
    fabric = Fabric(accelerator="cpu", devices=devices, strategy=strategy)
    fabric.launch()
    with fabric.init_module():
        module = Touched(terms=terms, late=not late)
    if not late:
        module.build()
    model, optimizer = fabric.setup(module, make_optimizer(module))
    touched: Any = model
    for step, batch in enumerate(batches(terms)):
        fabric.backward(loss_of(touched, model, batch, step))
        between_backward_and_step(touched, step)
        optimizer.step()
        optimizer.zero_grad()
        after_step(touched, step)
    module.seen.append(sums(module))
    if options is not None:
        strategy.close()
    return module.seen


def by_transformers(
    root: Path, options: dict[str, Any] | None, *, terms: bool = False, late: bool = False
) -> list[Any]:
    """Run the tables in a callback and an overridden loss of transformers' Trainer."""

    class Model(Touched, transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.PretrainedConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Leave the weights as torch makes them."""

    class Trainer(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = self.optimizer or make_optimizer(self.model)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return loss_of(self.model, model, inputs["x"][0], self.state.global_step)

    class Hooks(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            between_backward_and_step(kwargs["model"], state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            after_step(kwargs["model"], state.global_step - 1)

    def train(config: dict[str, Any] | None) -> list[Any]:
        args = transformers.TrainingArguments(
            str(root / "out"),
            per_device_train_batch_size=1,
            num_train_epochs=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            train_sampling_strategy="sequential",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            use_cpu=config is None,
            deepspeed=config,
        )
        model: Any = Model.from_pretrained(root / "model") if late else Model(transformers.PretrainedConfig())
        model.terms = terms
        data: Any = [{"x": batch} for batch in batches(terms)]
        Trainer(model=model, args=args, train_dataset=data, callbacks=[Hooks()]).train()
        model.seen.append(sums(model))
        seen: list[Any] = model.seen
        return seen

    if late:
        Model(transformers.PretrainedConfig()).save_pretrained(root / "model")
    if options is None:
        return train(None)
    with SmartInfinityTraining(root / "storage", **options) as training:
        return train(training.config)


DOORS: dict[str, Callable[..., list[Any]]] = {
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "transformers": by_transformers,
}


def on_each_rank(out: Path) -> dict[tuple[str, bool], list[Any]]:
    """Return what hooks of Lightning and a loop of Fabric see; transformers' Trainer has one process on CPUs."""
    return {
        (door, terms): DOORS[door](out, {}, terms=terms, late=not terms, devices=2)
        for door, terms in (("Lightning", False), ("Fabric", True))
    }


# Some parameters are gathered for a write, and smaller ones stay whole.
BACKWARD = {"overlap": "backward", "zero": {"stage3_param_persistence_threshold": 64}}
ON_STORAGE = {
    "state_format": "fp32",
    "zero": {"offload_param": {"device": "nvme"}},
    "transfer": TransferConfig(parameter_bytes="64KB"),
}


@cache
def in_memory(door: str, terms: bool) -> list[Any]:
    """Return what the same training sees in memory."""
    with TemporaryDirectory() as folder:
        return DOORS[door](Path(folder), None, terms=terms)


@pytest.mark.parametrize(
    ("door", "options", "late"),
    [
        ("Lightning", {"overlap": "none"}, True),
        ("Lightning", BACKWARD, False),
        ("Lightning", ON_STORAGE, True),
        ("Fabric", BACKWARD, False),
        ("Fabric", ON_STORAGE, True),
        ("transformers", BACKWARD, False),
        ("transformers", ON_STORAGE, True),
    ],
)
def test_hooks_read_and_write_parameters_and_gradients(
    door: str, options: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    """Groups by shape, writes, reads and gradients are those of memory, one after the other in one training."""
    assert_alike(DOORS[door](tmp_path, options, late=late), in_memory(door, False))


@pytest.mark.parametrize("door", DOORS)
def test_terms_of_the_loss_over_parameters(door: str, tmp_path: Path) -> None:
    """Penalties train as in memory, before or after the forward, over parameters, views and kept ones."""
    assert_alike(DOORS[door](tmp_path, BACKWARD, terms=True), in_memory(door, True))


def test_two_processes(tmp_path: Path) -> None:
    """Both ranks see what one process sees of the same data."""
    for of_rank in on_ranks(on_each_rank, tmp_path):
        for (door, terms), seen in of_rank.items():
            assert_alike(seen, in_memory(door, terms))
