"""Code that touches parameters and gradients works as in memory, by each entry point; other packages stay unchanged."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from deepspeed.runtime.zero.partition_parameters import get_all_subclasses
from lightning.fabric import Fabric
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_smartinfinity import SmartInfinityFabricStrategy, SmartInfinityStrategy, TransferConfig
from lightning_smartinfinity.integrations.transformers import SmartInfinityTraining
from lightning_smartinfinity.zero3.parameters import torch_functions
from tests.helpers.plain import assert_alike
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer
from tests.huggingface.trained import calling
from tests.training.everyday_code import (
    READS,
    Touched,
    after_step,
    batches,
    between_backward_and_step,
    loss_of,
    make_optimizer,
    sums,
)
from tests.training.small import Small


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

    hooks = calling(
        on_pre_optimizer_step=lambda args, state, *_, model, **__: between_backward_and_step(model, state.global_step),
        on_step_end=lambda args, state, *_, model, **__: after_step(model, state.global_step - 1),
    )

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
        Trainer(model=model, args=args, train_dataset=data, callbacks=[hooks]).train()
        model.seen.append(sums(model))
        return model.seen  # type: ignore[no-any-return]

    if late:
        Model(transformers.PretrainedConfig()).save_pretrained(root / "model")
    if options is None:
        return train(None)
    with SmartInfinityTraining(root / "storage", **options) as training:
        return train(training.config)


ENTRY_POINTS: dict[str, Callable[..., list[Any]]] = {
    "Lightning": by_lightning,
    "Fabric": by_fabric,
    "transformers": by_transformers,
}


def on_each_rank(out: Path) -> dict[tuple[str, bool], list[Any]]:
    """Return what hooks of Lightning and a loop of Fabric see; transformers' Trainer has one process on CPUs."""
    return {
        (entry_point, terms): ENTRY_POINTS[entry_point](out, {}, terms=terms, late=not terms, devices=2)
        for entry_point, terms in (("Lightning", False), ("Fabric", True))
    }


# Some parameters are gathered for a write, and smaller ones stay whole.
BACKWARD = {"overlap": "backward", "zero": {"stage3_param_persistence_threshold": 64}}
ON_STORAGE = {
    "state_format": "fp32",
    "zero": {"offload_param": {"device": "nvme"}},
    "transfer": TransferConfig(parameter_bytes="64KB"),
}


@functools.cache
def in_memory(entry_point: str, terms: bool) -> list[Any]:
    """Return what the same training sees in memory."""
    with TemporaryDirectory() as folder:
        return ENTRY_POINTS[entry_point](Path(folder), None, terms=terms)


@pytest.mark.parametrize(
    ("entry_point", "options", "late"),
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
    entry_point: str, options: dict[str, Any], late: bool, tmp_path: Path
) -> None:
    """Groups by shape, writes, reads and gradients are those of memory, one after the other in one training."""
    assert_alike(ENTRY_POINTS[entry_point](tmp_path, options, late=late), in_memory(entry_point, False))


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_terms_of_the_loss_over_parameters(entry_point: str, tmp_path: Path) -> None:
    """Penalties train as in memory, before or after the forward, over parameters, views and kept ones."""
    assert_alike(ENTRY_POINTS[entry_point](tmp_path, BACKWARD, terms=True), in_memory(entry_point, True))


def test_two_processes(tmp_path: Path) -> None:
    """Both ranks see what one process sees of the same data."""
    for of_rank in on_ranks(on_each_rank, tmp_path):
        for (entry_point, terms), seen in of_rank.items():
            assert_alike(seen, in_memory(entry_point, terms))


# ---- a training leaves other packages as they were


OWNERS = [
    *(torch, torch.nn, torch.nn.functional, torch.nn.init, torch.autograd, torch.utils.checkpoint),
    *(nn.Parameter, torch.Tensor, torch.optim.Optimizer),
]

OTHERS = ("torch", "deepspeed", "lightning", "pytorch_lightning", "transformers", "accelerate", "peft", "trl", "sys")
# What stays on purpose, with the reason.
STAYS = {
    "lightning.fabric.strategies.STRATEGY_REGISTRY": "Fabric(strategy='smart_infinity') needs no import",
    "lightning.pytorch.strategies.StrategyRegistry": "Trainer(strategy='smart_infinity') needs no import",
    "sys.meta_path": "it fills these registries when Lightning is imported",
    "sys.excepthook": "it tells what a checkpoint folder is, at the end of a program that opened it as a file",
    "torch.optim.optimizer._global_optimizer_pre_hooks": "a module stays partitioned, and another optimizer's step on "
    "it would be lost",
}


def attributes_of_torch() -> dict[tuple[Any, str], Any]:
    """Return the functions and classes of torch's namespaces and classes."""
    owners = [*OWNERS, *get_all_subclasses(nn.Module)]
    return {(owner, name): value for owner in owners for name, value in vars(owner).items() if callable(value)}


def of_this_package() -> set[str]:
    """Return the names of what other packages have of ours: in their modules and classes, and in containers there."""
    found, seen = set(), set()
    for module in [value for name, value in list(sys.modules.items()) if name.split(".")[0] in OTHERS]:
        for name, value in list(vars(module).items()):
            if issubclass(type(value), types.ModuleType) or id(value) in seen or value is sys.modules:
                continue
            seen.add(id(value))
            inside = vars(value).items() if issubclass(type(value), type) else [("", value)]
            found |= {
                f"{module.__name__}.{name}{'.' if attribute else ''}{attribute}"
                for attribute, content in list(inside)
                if any(is_ours(each) for each in contents(content))
            }
    return found


def contents(value: Any, depth: int = 3) -> Iterator[Any]:
    """Yield a value, and what is in it if it is a container."""
    yield value
    if depth and issubclass(type(value), (dict, list, tuple)):
        # Some of transformers' dictionaries import models when they are asked for their values.
        for each in list(dict.values(value) if issubclass(type(value), dict) else value):
            yield from contents(each, depth - 1)


def is_ours(value: Any) -> bool:
    """Return whether a function, whatever it is wrapped in, a class or an object is this package's."""
    kind = type(value)  # some objects of torch warn when they are asked for their class
    if issubclass(kind, property):
        return any(is_ours(function) for function in (value.fget, value.fset, value.fdel))
    if issubclass(kind, functools.partial):
        return is_ours(value.func)
    if issubclass(kind, (staticmethod, classmethod, types.MethodType)):
        return is_ours(value.__func__)
    if issubclass(kind, types.FunctionType):
        module = value.__globals__.get("__name__")  # functools.wraps copies __module__
    else:
        module = vars(value if issubclass(kind, type) else kind).get("__module__")
    return str(module).startswith("lightning_smartinfinity")


def use_plain_models() -> None:
    """Trace, script and export a model that no strategy knows, and check what it returns."""
    batch = torch.ones(2, 3)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    expected = model(batch)
    for made in (
        torch.jit.trace(model, batch),
        torch.jit.script(model),
        torch.export.export(model, (batch,)).module(),
        torch.func.vmap(lambda row: torch.func.functional_call(model, dict(model.named_parameters()), (row,))),
    ):
        torch.testing.assert_close(made(batch), expected)
    nodes = {node.kind() for node in torch.jit.trace(model, batch).inlined_graph.nodes()}
    assert "aten::linear" in nodes and "prim::PythonOp" not in nodes


@pytest.mark.parametrize(
    ("entry_point", "late"), [("Lightning", False), ("Lightning", True), ("Fabric", True), ("transformers", False)]
)
def test_nothing_of_torch_is_left_replaced(
    entry_point: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attribute is the one from before, none has come, and plain models do what they did, in mid-fit, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_plain_models()
    before, ours_before = attributes_of_torch(), of_this_package()  # a strategy of another test may still be open
    monkeypatch.setitem(READS, "plain models", lambda _: use_plain_models())
    ENTRY_POINTS[entry_point](tmp_path, {}, late=late)
    after = attributes_of_torch()
    for attributes in (before, after):  # transformers brings it, without this package as well
        attributes.pop((nn.Module, "smart_apply"), None)
    known = {owner for owner, _ in before}
    assert (
        {key for key in after if key[0] in known and after[key] != before.get(key)} == set()
        and before.keys() - after.keys() == set()
        and of_this_package() <= STAYS.keys() | ours_before
    )
    use_plain_models()


@pytest.mark.parametrize("efficient", [True, False])
def test_an_engine_keeps_no_gathered_weights_for_backward(efficient: bool, tmp_path: Path) -> None:
    """In forward, and where backward runs a part again, linear is DeepSpeed's, in a second fit as in the first."""
    found: list[Any] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(nn.functional.linear)
        return x.sin()

    module = Small(term=lambda _: checkpoint(note, torch.ones(1, requires_grad=True), use_reentrant=False).sum())
    for number in range(2):
        strategy = SmartInfinityStrategy(tmp_path / str(number), zero={"memory_efficient_linear": efficient})
        fit(module, tmp_path, strategy, precision="32-true", max_steps=1)
    wanted = torch_functions._linear if efficient else nn.functional.linear
    assert found == [wanted] * 4
