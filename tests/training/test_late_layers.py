"""Modules that come late, take no hooks or run by torch.func train as in memory, or raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.zero3.parameters.module_guard import refuse_late_parameters
from tests.helpers.trainers import quiet_trainer
from tests.training.small import Small
from tests.training.test_bad_input import assert_helpful


class Lit(Small):
    """Trains two layers on the CPU.

    Args:
        changes: Function that changes the layers in the constructor.
        begins: Function that is called with the module when the second epoch begins.
        calls: Function that calls the layers.
    """

    def __init__(
        self,
        changes: Callable[[nn.Sequential], object] = lambda net: None,
        begins: Callable[[Lit], object] = lambda module: None,
        calls: Callable[[nn.Sequential, torch.Tensor], torch.Tensor] = lambda net, batch: net(batch),
    ) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 1))
        self.begins, self.calls = begins, calls
        changes(self.net)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.begins(self)

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        loss = (self.calls(self.net, batch) - 1).square().mean()
        self.seen.append(loss.item())
        return loss


class BuiltLate(Lit):
    """Builds a lazy layer while ZeRO-3 partitions it."""

    def configure_model(self) -> None:
        self.net = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 1))


def trained(module: Lit, folder: Path, strategy: Any = None, **settings: Any) -> Lit:
    trainer = quiet_trainer(
        folder, strategy, precision="32-true", max_epochs=2, use_distributed_sampler=False, **settings
    )
    trainer.fit(module)
    return module


def registers(net: nn.Sequential) -> None:
    def hook(layer: nn.Module, _: object) -> None:
        if not hasattr(layer, "late"):
            layer.late = nn.Parameter(torch.zeros(1))

    net[2].register_forward_pre_hook(hook)


def replaces(number: int, made: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Sequential], None]:
    def change(net: nn.Sequential) -> None:
        net[number] = made(net[number])

    return change


def traced(layer: nn.Module) -> Any:
    return torch.jit.trace(layer, torch.zeros(2, 6))


def scaled(net: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    values = {name: param * 1.01 for name, param in net.named_parameters()}
    return torch.func.functional_call(net, values, (batch,))


def unscaled(net: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    return torch.func.functional_call(net, dict(net.named_parameters()), (batch,))


def by_functions(net: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    first, last = net[0], net[2]
    hidden = nn.functional.linear(batch, 1.01 * first.weight, first.bias).tanh()
    return nn.functional.linear(hidden, 1.01 * last.weight, last.bias)


def replacing(net: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    result = net(batch)
    net[0].bias = nn.Parameter(net[0].bias.detach() * 0.9)  # type: ignore[union-attr, operator]
    return result


class Replacing(nn.Linear):
    """Replaces its bias whenever it runs."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.bias = nn.Parameter(self.bias.detach() * 0.9)
        return super().forward(batch)


def with_gradient(net: nn.Sequential, batch: torch.Tensor) -> torch.Tensor:
    return net(batch) + torch.func.grad(lambda x: net(x).sum())(batch).mean()


CASES: dict[str, tuple[Callable[[], Lit], str]] = {
    "layer added": (lambda: Lit(begins=lambda module: module.net.append(nn.Linear(1, 1))), "'net.3.weight' of Linear"),
    "frozen layer added": (
        lambda: Lit(begins=lambda module: setattr(module, "extra", nn.Linear(1, 1).requires_grad_(False))),
        "'extra.weight' of Linear",
    ),
    "layer replaced": (lambda: Lit(begins=lambda m: m.net.insert(2, nn.Linear(6, 6))), "'net.2.weight' of Linear"),
    "parameter replaced": (
        lambda: Lit(begins=lambda module: setattr(module.net[0], "bias", nn.Parameter(torch.zeros(6)))),
        "Linear 'net.0' has the parameter 'bias'",
    ),
    "parameter replaced in forward": (lambda: Lit(calls=replacing), "'net.0.bias' of Linear"),
    "parameter replaced by its layer": (
        lambda: Lit(replaces(2, lambda _: Replacing(6, 1))),
        "Replacing 'net.2' has the parameter 'bias'",
    ),
    "parameter of a hook": (lambda: Lit(registers), "Linear 'net.2' has the parameter 'late'"),
    "scripted": (lambda: Lit(replaces(2, torch.jit.script)), "Module 'net.2' was made by torch.jit.script"),
    "scripted activation": (lambda: Lit(replaces(1, torch.jit.script)), "Module 'net.1' was made by torch.jit"),
    "traced layers": (lambda: Lit(replaces(2, lambda layer: traced(nn.Sequential(layer)))), "Module 'net.2' was made"),
    "lazy": (lambda: Lit(replaces(0, lambda _: nn.LazyLinear(6))), "LazyLinear 'net.0' is lazy"),
    "lazy buffer": (lambda: Lit(replaces(1, lambda _: nn.LazyBatchNorm1d(affine=False))), "its 'running_mean' has no"),
    "lazy in configure_model": (BuiltLate, "LazyLinear is lazy"),
    "functional_call": (lambda: Lit(calls=scaled), "Linear 'net.0' ran with a tensor"),
    "grad": (lambda: Lit(calls=with_gradient), "Sequential 'net' ran within a transform of torch.func"),
    "vmap": (lambda: Lit(calls=lambda net, batch: torch.func.vmap(net)(batch)), "Sequential 'net' ran within"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_be_partitioned_is_named(name: str, tmp_path: Path) -> None:
    """The error is this package's, and names the module."""
    make, said = CASES[name]
    with pytest.raises(UnsupportedError) as caught:
        trained(make(), tmp_path)
    assert_helpful(caught.value, said)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Lit(replaces(2, traced)),
        lambda: Lit(calls=unscaled),
        lambda: Lit(calls=by_functions),
        lambda: Lit(begins=lambda module: module.net[2].register_parameter("bias", None)),
    ],
    ids=["a traced layer", "functional_call", "functions", "a parameter removed"],
)
def test_what_trains_as_in_memory(make: Callable[[], Lit], tmp_path: Path) -> None:
    """The losses are those of plain Lightning."""
    expected = trained(make(), tmp_path, "auto").seen
    assert trained(make(), tmp_path).seen == pytest.approx(expected, abs=1e-6)


def test_a_trained_module_is_not_traced(tmp_path: Path) -> None:
    """Its parameters are partitioned; a module with its weights can be traced instead."""
    module = trained(Lit(), tmp_path)
    batch = torch.zeros(4, 8)
    ways: list[Callable[[], object]] = [
        lambda: torch.jit.trace(module.net, batch),
        lambda: torch.jit.script(module.net),
        lambda: torch.export.export(module.net, (batch,)),
    ]
    for way in ways:
        with pytest.raises(UnsupportedError) as caught:
            way()
        assert_helpful(caught.value, "was traced, scripted or exported", "save_pretrained")
    refuse_late_parameters(module)
    module.net.append(nn.LayerNorm(1, bias=False))
    with pytest.raises(UnsupportedError, match=r"Parameter 'net\.3\.weight' of LayerNorm came"):
        refuse_late_parameters(module)


class Unhashable:
    """Defines == without a hash, as a dataclass does."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("== was called")

    __hash__ = None  # type: ignore[assignment]


class Noting(Unhashable, pl.Callback):
    pass


class Saving(Unhashable, ModelCheckpoint):
    pass


def test_callbacks_are_told_apart_by_identity(tmp_path: Path) -> None:
    """Callbacks may define == as they like, those that save included."""
    saving = [Saving(tmp_path / "a", every_n_train_steps=3, save_top_k=-1), Saving(tmp_path / "b", every_n_epochs=2)]
    trained(Lit(), tmp_path, callbacks=[Noting(), Noting(), *saving], enable_checkpointing=True)
    assert [len(list((tmp_path / name).iterdir())) for name in "ab"] == [2, 1]
