"""Modules that come late, take no hooks or run by torch.func train as in memory, or raise an error that names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.integrations.trainer.callback_support import synchronize_layers
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import _TRACE, ModuleTrace
from lightning_smartinfinity.zero3.parameters.module_guard import refuse_late_parameters
from tests.helpers.trainers import fit, quiet_trainer
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
    "parameter replaced": (
        lambda: Lit(begins=lambda module: setattr(module.net[0], "bias", nn.Parameter(torch.zeros(6)))),
        "Linear 'net.0' has the parameter 'bias'",
    ),
    "parameter replaced in forward": (lambda: Lit(calls=replacing), "'net.0.bias' of Linear"),
    "parameter replaced by its layer": (
        lambda: Lit(replaces(2, lambda _: Replacing(6, 1))),
        "Replacing 'net.2' has the parameter 'bias'",
    ),
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


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Plugin(LayerSync):
    """Notes what it is asked to convert."""

    def apply(self, model: Any) -> Any:
        model.seen.append(len(list(model.parameters())))
        return model

    def revert(self, model: Any) -> Any:
        return model


def test_a_plugin_of_the_users_converts_the_module(tmp_path: Path) -> None:
    """It is called as with Lightning's DDP, once."""
    module = Small()
    fit(module, tmp_path, plugins=[Plugin()], max_steps=1)
    assert module.seen[0] == 6 and len(module.seen) == 2


@pytest.mark.parametrize(("device", "ranks", "kind"), [(GPU, 2, nn.SyncBatchNorm), (CPU, 1, nn.BatchNorm1d)])
def test_torch_synchronizes_batch_norms_of_several_processes(
    device: torch.device, ranks: int, kind: type[nn.Module]
) -> None:
    """The parameters stay; one process has nothing to synchronize."""
    model = nn.Sequential(nn.BatchNorm1d(2))
    converted = synchronize_layers(model, TorchSyncBatchNorm(), device=device, ranks=ranks)
    assert type(converted[0]) is kind  # type: ignore[index]
    assert converted[0].weight is model[0].weight  # type: ignore[index]


def test_batch_norms_on_cpus_are_refused() -> None:
    """Torch's own error would come in the first step. A model without batch norms trains."""
    net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(UnsupportedError, match="'1': torch's SyncBatchNorm needs a GPU") as caught:
        synchronize_layers(net, TorchSyncBatchNorm(), device=CPU, ranks=2)
    assert "sync_batchnorm" in caught.value.remedy
    assert synchronize_layers(net[:1], TorchSyncBatchNorm(), device=CPU, ranks=2)[0] is net[0]  # type: ignore[index]


def test_no_module_copies_the_trace(tmp_path: Path) -> None:
    """Every module that releases parameters looks at the rest of the trace, by an iterator."""

    def note(module: Small) -> None:
        optimizer: Any = module.trainer.strategy.optimizers[0]
        traces.append(getattr(optimizer.parameter_offload.get_param_coordinator(), _TRACE))

    traces: list[Any] = []
    fit(Small(on_train_batch_end=note, on_train_batch_start=note), tmp_path, precision="32-true", max_steps=4)
    trace = max((each for each in traces if type(each) is ModuleTrace), key=len)
    rest = trace[1:]
    assert next(rest) is trace[1] and len(list(rest)) == len(trace) - 2 > 3
