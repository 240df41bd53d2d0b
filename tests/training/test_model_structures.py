"""Modules that are hard for ZeRO-3: structures, graphs, unused parameters and compilation train like plain torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from torch import nn

from lightning_smartinfinity import UnsupportedError
from lightning_smartinfinity.integrations.trainer.callback_support import synchronize_layers
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import _TRACE, ModuleTrace
from lightning_smartinfinity.zero3.parameters.module_guard import refuse_late_parameters
from lightning_smartinfinity.zero3.setup.validation import check_model
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.hard_modules import WIDTH, Case, Reused, Shapes, Stack, Trained, TwoBackwards
from tests.helpers.long_cases import long_but
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit, quiet_trainer
from tests.training.model_runs import (
    CASES,
    CHECKPOINTS,
    GRAPHS,
    STRUCTURES,
    UNUSED,
    assert_trains_like_torch,
    on_each_rank,
    train_near_storage,
    trainer_for,
)
from tests.training.small import Small

# Two processes train these in turn, or another case has the same in another precision.
LONG = {
    "adapters, and an empty parameter group",
    "parameters in containers",
    "a tensor larger than ring and sub-group",
    "a module in two parents",
    "a gradient penalty",
    "losses balanced by their slopes",
    "in bf16",
    "by one micro-batch",
    "by another module",
    *(CHECKPOINTS.keys() - {"reentrant, small buckets", "not reentrant", "selective"}),
}


@pytest.mark.parametrize("name", long_but([name for name in CASES if name not in LONG], CASES))
def test_every_case_trains_like_torch(name: str, tmp_path: Path) -> None:
    """Modules used several times, tied, nested, partly frozen, or with tensors of unusual sizes train like torch.

    Each arrival of the gradient of a weight that activation checkpoints share counts once, before or after its bucket
    has left. Stock DeepSpeed keeps the last arrival only, or fails an assertion if two fall into one bucket.

    A step without a gradient applies no decay, no moment and no count to a parameter, which may be used alternately,
    late, by one micro-batch, or never. Stock applies the last gradient again, and weight decay.

    Parameters are gathered for retained graphs and for gradients of gradients. Stock ZeRO-3 has released them by then,
    and fails on shapes in the middle of the second backward.
    """
    assert_trains_like_torch(CASES[name], train_near_storage(CASES[name], tmp_path))


class WithBias(Reused):
    """A module whose layer has a bias of equal elements.

    Args:
        expanded: Whether it is one element, expanded.
    """

    def __init__(self, *, expanded: bool) -> None:
        super().__init__()
        self.layer.bias = nn.Parameter(torch.full((1,), 0.5).expand(WIDTH) if expanded else torch.full((WIDTH,), 0.5))


def test_an_expanded_parameter_gets_elements_of_its_own(tmp_path: Path) -> None:
    """Torch's optimizers refuse to update such a parameter in place. Here it trains as its copy would."""
    trained = train_near_storage(Case(partial(WithBias, expanded=True)), tmp_path)
    assert_trains_like_torch(Case(partial(WithBias, expanded=False)), trained)


class TiedByData(Reused):
    """A module with two parameters that share one memory, which a plain optimizer would update twice."""

    def __init__(self) -> None:
        super().__init__()
        self.back.weight.data = self.front.weight.data


def test_empty_parameters_are_refused_at_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's gather would fail on them in the middle of the first forward."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match=r"'empties.0' has no elements"):
        check_model(Shapes(empty=True))
    check_model(Shapes())


def test_parameters_of_several_dtypes_are_reported() -> None:
    """DeepSpeed casts an fp32 norm in a bf16 model. A warning gives an example of each dtype."""
    module = Reused().bfloat16()
    check_model(module)
    module.layer.float()
    with pytest.warns(UserWarning, match=r"'front.weight' is torch.bfloat16, 'layer.weight' is torch.float32"):
        check_model(module)


ON_TWO = (
    "tensors of odd sizes and not contiguous",
    "adapters, and an empty parameter group",
    "a tensor larger than ring and sub-group",
    "reentrant, accumulating",
    "by one micro-batch",
    "losses balanced by their slopes",
)
ALL_ON_TWO = (
    *ON_TWO,
    "a module in two parents",
    "parameters in containers",
    "nested outputs",
    "reentrant, one bucket",
    "reentrant, bf16",
    "in bf16",
    "a gradient penalty",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Trained]:
    """Train every case of these tests in turn in one pair of processes."""
    names = ALL_ON_TWO if request.config.getoption("long") else ON_TWO
    return on_ranks(on_each_rank, tmp_path_factory.mktemp("two"), *names)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", long_but(ON_TWO, ALL_ON_TWO))
def test_two_processes_train_like_torch(name: str, trained: dict[str, Trained]) -> None:
    """Rank 0's losses, the masters and the update counts equal those of one torch process on both ranks' batches."""
    assert_trains_like_torch(CASES[name], trained[name], world_size=2)


class Differentiable(TwoBackwards):
    """A module that asks for differentiable gradients of its parameters."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        self.manual_backward(self.loss(self.case.batch(0), 0), create_graph=True)


def test_resuming_keeps_every_count(tmp_path: Path) -> None:
    """A run resumed after three steps has the losses, masters and counts of an uninterrupted run, bit for bit."""
    case = UNUSED["by one micro-batch in bf16"]
    straight = train_near_storage(case, tmp_path / "straight")
    first = dataclasses.replace(case, steps=3)
    trainer = trainer_for(first, tmp_path / "first")
    trainer.fit(first.module())
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    resumed = train_near_storage(case, tmp_path / "resumed", ckpt_path=str(tmp_path / "three.ckpt"))
    assert resumed.steps == straight.steps and resumed.losses == straight.losses[3 * case.accumulate :]
    assert_equal(resumed.masters, straight.masters)


class Compiled(Stack):
    """A module with a submodule that may be compiled in place or wrapped."""

    def __init__(self, compile_it: Callable[[nn.Module], Any] = lambda inner: inner) -> None:
        super().__init__()
        self.layer = compile_it(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)))


def in_place(inner: nn.Module) -> nn.Module:
    inner.compile(backend="aot_eager")
    return inner


def test_a_module_compiled_in_place_trains_like_torch(tmp_path: Path) -> None:
    """Graphs break at ZeRO-3's hooks, which gather and release parameters. The parts between the hooks are compiled.

    Our classes of parameters break none.
    """
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    trained = train_near_storage(Case(partial(Compiled, in_place), steps=2), tmp_path)
    assert (
        counters["stats"]["calls_captured"] > 0
        and counters["graph_break"]
        and not [why for why in counters["graph_break"] if "partitioned_parameter" in why]
    )
    assert_trains_like_torch(Case(Compiled, steps=2), trained)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TiedByData, r"'back.weight' and 'front.weight' share memory"),
        (Differentiable, r"backward\(create_graph=.*torch.autograd.grad"),
        (
            partial(Compiled, partial(torch.compile, backend="eager")),
            r"'layer' is wrapped by torch.compile.*module.compile",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(module: Any, message: str, tmp_path: Path) -> None:
    """ZeRO-3 would untie parameters over the same memory silently; the error names both.

    Gradients move to the arena as soon as they arrive, so none is differentiable; the error names torch.autograd.grad.
    A compiled wrapper hides parameters from ZeRO-3's hooks. Stock fails on an attribute in the first forward.
    """
    with pytest.raises(UnsupportedError, match=message):
        train_near_storage(Case(module), tmp_path)


# ---- one process on a CPU has nothing to reduce, so its gradients bypass DeepSpeed's buckets without changing results


PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
ODD = STRUCTURES["tensors of odd sizes and not contiguous"]
BYPASSING = {
    **{f"odd shapes, {precision}": dataclasses.replace(ODD, precision=precision, clip=0.5) for precision in PRECISIONS},
    "odd shapes, accumulating": dataclasses.replace(ODD, precision="bf16-mixed", accumulate=3),
    "one weight in three places": STRUCTURES["one weight in three places"],
    "reentrant": dataclasses.replace(CHECKPOINTS["reentrant, bf16"], zero={}),
    "unused": UNUSED["by one micro-batch in bf16"],
    "retained": GRAPHS["one forward, two backwards"],
    "penalty": GRAPHS["a gradient penalty in bf16"],
}
USUAL = ("odd shapes, 32-true", "odd shapes, accumulating", "reentrant", "unused", "retained", "penalty")


@pytest.mark.parametrize("name", long_but(USUAL, BYPASSING))
def test_same_bits_with_and_without_buckets(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, masters and update counts are the same bit for bit."""
    straight = train_near_storage(BYPASSING[name], tmp_path / "straight")
    reduced: list[int] = []
    reduce = StorageOptimizer.partition_grads
    monkeypatch.setattr(
        StorageOptimizer, "partition_grads", lambda *args: (reduced.append(len(args[1])), reduce(*args))[1]
    )
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)
    bucketed = train_near_storage(BYPASSING[name], tmp_path / "bucketed")
    assert straight.losses == bucketed.losses and straight.steps == bucketed.steps
    assert max(reduced) > 1, "no gradients were reduced together"
    for master, expected in zip(straight.masters.values(), bucketed.masters.values(), strict=True):
        assert torch.equal(master, expected)


# ---- modules that come late, take no hooks or run by torch.func train as in memory, or raise an error that names them


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


def trained_late(module: Lit, folder: Path, strategy: Any = None, **settings: Any) -> Lit:
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


LATE: dict[str, tuple[Callable[[], Lit], str]] = {
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


@pytest.mark.parametrize("name", LATE)
def test_what_cannot_be_partitioned_is_named(name: str, tmp_path: Path) -> None:
    """The error is this package's, and names the module."""
    make, said = LATE[name]
    with refused(UnsupportedError, said):
        trained_late(make(), tmp_path)


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
    assert trained_late(make(), tmp_path).seen == pytest.approx(trained_late(make(), tmp_path, "auto").seen, abs=1e-6)


def test_a_trained_module_is_not_traced(tmp_path: Path) -> None:
    """Its parameters are partitioned; a module with its weights can be traced instead."""
    module = trained_late(Lit(), tmp_path)
    batch = torch.zeros(4, 8)
    ways: list[Callable[[], object]] = [
        lambda: torch.jit.trace(module.net, batch),
        lambda: torch.jit.script(module.net),
        lambda: torch.export.export(module.net, (batch,)),
    ]
    for way in ways:
        with refused(UnsupportedError, "was traced, scripted or exported", "save_pretrained"):
            way()
    refuse_late_parameters(module)
    module.net.append(nn.LayerNorm(1, bias=False))
    with pytest.raises(UnsupportedError, match=r"Parameter 'net\.3\.weight' of LayerNorm came"):
        refuse_late_parameters(module)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class ConvertingPlugin(LayerSync):
    """Notes what it is asked to convert."""

    def apply(self, model: Any) -> Any:
        model.seen.append(len(list(model.parameters())))
        return model

    def revert(self, model: Any) -> Any:
        return model


def test_a_plugin_of_the_users_converts_the_module(tmp_path: Path) -> None:
    """It is called as with Lightning's DDP, once."""
    module = Small()
    fit(module, tmp_path, plugins=[ConvertingPlugin()], max_steps=1)
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
    with refused(UnsupportedError, match="'1': torch's SyncBatchNorm needs a GPU", remedy="sync_batchnorm"):
        synchronize_layers(net, TorchSyncBatchNorm(), device=CPU, ranks=2)
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
