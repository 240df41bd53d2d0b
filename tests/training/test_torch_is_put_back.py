"""A training leaves other packages as they were: models of the process are traced and exported as without it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import get_all_subclasses
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.parameters import torch_functions
from tests.fabric.worker import quiet_fabric
from tests.helpers.model_folder import make_model_folder
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit
from tests.huggingface.trained import train
from tests.training.small import Small

RECIPE = Recipe(depth=1, max_steps=2)
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


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()


def use_plain_models() -> None:
    """Trace, script and export a model that no strategy knows, and check what it returns."""
    batch, model = torch.ones(2, 3), plain()
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


class Late(LitTiny):
    """Builds its model while ZeRO-3 partitions it."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        del self.model

    def configure_model(self) -> None:
        self.model = RECIPE.build_model()


class UsesPlainModels(pl.Callback):
    def on_train_batch_end(self, *_: Any) -> None:
        use_plain_models()


def by_trainer(module: Callable[[Recipe], LitTiny], folder: Path) -> None:
    trainer = fit(module(RECIPE), folder, precision="32-true", max_steps=2, callbacks=[UsesPlainModels()])
    assert isinstance(trainer.strategy, SmartInfinityStrategy)
    use_plain_models()
    trainer.strategy.close()


def by_fabric(folder: Path) -> None:
    fabric = quiet_fabric(folder / "storage")
    with fabric.init_module():
        module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.backward(model(RECIPE.batch(0, 0)))
    optimizer.step()
    use_plain_models()
    fabric.strategy.close()


def by_transformers(folder: Path) -> None:
    train(make_model_folder(folder / "model"), folder / "out", strategy={"storage": folder / "storage"})


@pytest.mark.parametrize(
    "training",
    [lambda folder: by_trainer(LitTiny, folder), lambda folder: by_trainer(Late, folder), by_fabric, by_transformers],
    ids=["trainer", "configure_model", "fabric", "transformers"],
)
def test_nothing_of_torch_is_left_replaced(
    training: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attribute is the one from before, none has come, and plain models do what they did, in mid-fit, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_plain_models()
    before, ours_before = attributes_of_torch(), of_this_package()  # a strategy of another test may still be open
    training(tmp_path)
    after = attributes_of_torch()
    for attributes in (before, after):  # transformers brings it, without this package as well
        attributes.pop((nn.Module, "smart_apply"), None)
    known = {owner for owner, _ in before}
    assert {key for key in after if key[0] in known and after[key] != before.get(key)} == set()
    assert before.keys() - after.keys() == set()
    assert of_this_package() <= STAYS.keys() | ours_before
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
