"""A training leaves other packages as they were: models of the process are traced and exported as without it."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import get_all_subclasses
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import SmartInfinityStrategy
from lightning_smartinfinity.zero3.parameters import torch_functions
from tests.helpers.trainers import fit
from tests.training.everyday_code import READS
from tests.training.small import Small
from tests.training.test_everyday_code import DOORS

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
    ("door", "late"), [("Lightning", False), ("Lightning", True), ("Fabric", True), ("transformers", False)]
)
def test_nothing_of_torch_is_left_replaced(
    door: str, late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attribute is the one from before, none has come, and plain models do what they did, in mid-fit, too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    use_plain_models()
    before, ours_before = attributes_of_torch(), of_this_package()  # a strategy of another test may still be open
    monkeypatch.setitem(READS, "plain models", lambda _: use_plain_models())
    DOORS[door](tmp_path, {}, late=late)
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
