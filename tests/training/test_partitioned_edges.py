"""Partitioned parameters at their edges: updates in flight, budgets, writes within forward, after the fit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_grad
from torch import nn

from lightning_smartinfinity import SmartInfinityStrategy, StorageError, UnsupportedError
from lightning_smartinfinity.zero3.parameters import gather_methods
from lightning_smartinfinity.zero3.parameters.status import Status
from tests.helpers import native_testing as testing
from tests.helpers.waiting import LIMIT
from tests.training.small import Small, assert_as_in_memory, changed, fitted

NOTHING_PERSISTS = {"stage3_param_persistence_threshold": 0}
CLONE = r"param\.(detach\(\)\.)?clone\(\)"


@pytest.mark.parametrize(
    "term",
    [
        lambda params: sum(param.pow(2).sum() for param in params),
        lambda params: nn.utils.parameters_to_vector(params).pow(2).sum(),
    ],
)
def test_a_penalty_stays_within_the_budget_of_parameters(
    term: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: list[int]
) -> None:
    """A step with a term over all parameters never has more of them gathered than the budget and two layers."""
    budget, gathered_most = 64 << 10, 0
    whole: dict[int, int] = {}
    switch, restore = Status.__set__, gather_methods.restore_classes

    def note(param: Any) -> None:
        is_gathered = param.ds_status is not ZeroParamStatus.NOT_AVAILABLE
        whole[param.ds_id] = param.ds_numel * param.element_size() if is_gathered else 0
        nonlocal gathered_most
        gathered_most = max(gathered_most, sum(whole.values()))

    def switching(status: Any, param: Any, value: ZeroParamStatus) -> None:
        switch(status, param, value)
        note(param)

    def restoring(params: list[Any]) -> None:
        restore(params)
        for param in params:
            note(param)

    def deepen(module: Small) -> None:
        layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
        module.net = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))

    monkeypatch.setattr(Status, "__set__", switching)
    monkeypatch.setattr(gather_methods, "restore_classes", restoring)
    stored: Any = {"zero": {"offload_param": {"device": "nvme"}}, "transfer": {"parameter_bytes": budget}}
    make = changed(deepen, term=lambda module: 0.01 * term(module.net.parameters()))
    assert_as_in_memory(tmp_path, make, SmartInfinityStrategy(tmp_path / "s", **stored))
    sizes = sorted(param.numel() * param.element_size() for param in make().parameters())
    assert (
        sum(sizes) > 2 * (budget + sum(sizes[-2:]))
        and sizes[-1] <= gathered_most <= budget + sum(sizes[-2:])
        and 0 < most[0] <= budget
    )


class Normalized(nn.Linear):
    """Normalizes its weight in forward, by itself or by ``data``."""

    by_data = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                weight = self.weight.data if self.by_data else self.weight
                weight.copy_(nn.functional.normalize(self.weight.detach(), dim=1))
        return super().forward(x)


def normalize(module: Small, *, by_data: bool = False) -> None:
    module.net[2].__class__, module.net[2].by_data = Normalized, by_data


def swap(module: Small) -> float:
    kept = [param.detach().clone() for param in module.parameters()]
    for param in module.parameters():
        param.data.mul_(0.5)
    half = float(sum(param.double().abs().sum() for param in module.parameters()))
    for param, value in zip(module.parameters(), kept, strict=True):
        param.data.copy_(value)
    return half


def gather(module: Small) -> float:
    params = list(module.parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        return float(sum(param.abs().sum() for param in params))


@torch.no_grad()
def enlarge(module: Small) -> None:
    params = list(module.net[2].parameters())
    with deepspeed.zero.GatheredParameters(params, enabled=hasattr(params[0], "ds_id")):
        params[0].mul_(1.1)


@torch.no_grad()
def halve(module: Small, *, by_data: bool = False) -> None:
    for param in module.parameters():
        (param.data if by_data else param).mul_(0.5)
        if hasattr(param, "ds_id"):
            assert torch.equal(safe_get_full_fp32_param(param), param)


def run_all(module: Small) -> None:
    module.net(torch.ones(2, 8))


class Scale(nn.Parameter):
    """A parameter with a method of its own."""

    def scaled(self) -> torch.Tensor:
        return self * 3.0


class Table(nn.Module):
    """A module that returns its parameters within structures."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 8)), nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self) -> Any:
        return {0: self.weight, "bias": [self.bias], "kind": "table"}


def add_users_of_parameters(module: Small) -> None:
    module.gate = nn.Parameter(torch.linspace(-1, 1, 8))
    module.act, module.distance = nn.Softplus(), nn.L1Loss(reduction="sum")
    module.parts = nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1))
    module.table = Table()


def use_parameters(module: Any) -> torch.Tensor:
    table = module.table()
    total = 0.1 * table[0].sum() * table["bias"][0].sum() + module.act(module.gate).sum()
    total = total + module.distance(module.net[0].weight[0], module.gate)
    return 0.1 * total + module.parts(module.gate)[0] + module.net[0](module.gate)[1]  # type: ignore[no-any-return]


def train_biases_slowly(module: Small) -> None:
    for name, param in module.named_parameters():
        param.requires_grad_("bias" in name)
    module.on_train_start = lambda: slow_down(module)  # type: ignore[method-assign]


def slow_down(module: Small) -> None:
    if isinstance(module.trainer.strategy, SmartInfinityStrategy):
        optimizer: Any = module.trainer.strategy._training_optimizer
        testing.inject(optimizer.update.drained_handler()._device._pipeline, max_delay_us=50_000)


def read_together(module: Small) -> float:
    """Return the sum of a trained bias and a frozen weight, which are gathered together."""
    return float(torch.cat([param.detach().flatten() for param in (module.net[0].weight, module.net[0].bias)]).sum())


def add_gate(module: Any) -> None:
    module.gate = nn.Linear(4, 4)


def read_by_thread(module: Any) -> float:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: float(next(module.gate.parameters()).sum())).result(LIMIT)


def gather_by_thread(module: Any) -> None:
    with ThreadPoolExecutor(1) as thread:
        params = deepspeed.zero.GatheredParameters(list(module.parameters()))
        thread.submit(params.__enter__).result(LIMIT)


def threads_are_refused(module: Any) -> torch.Tensor:
    for use in (read_by_thread, gather_by_thread) if hasattr(next(module.parameters()), "ds_id") else ():
        with pytest.raises(UnsupportedError, match="while another thread ran forward"):
            use(module)
    return torch.zeros(())


class Squares(torch.autograd.Function):
    """The sum of the squares of tensors, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack([tensor.pow(2).sum() for tensor in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(2 * gradient * tensor for tensor in ctx.saved_tensors)


def squares(module: Any, give: Callable[[Any], torch.Tensor] = torch.clone) -> Any:
    return Squares.apply(*map(give, module.gate.parameters()))  # type: ignore[no-untyped-call]


AS_IN_MEMORY: dict[str, tuple[Callable[[], Small], dict[str, Any]]] = {
    "a write in forward": (
        changed(normalize, on_train_batch_end=lambda m: float(m.net[2].weight.detach().norm(dim=1).max())),
        {},
    ),
    "a write in forward by data": (changed(lambda module: normalize(module, by_data=True)), {}),
    "reads and writes in inference mode": (lambda: Small(on_validation_epoch_end=swap), {}),
    "all are gathered after a validation of a part": (lambda: Small(on_validation_epoch_end=gather), {}),
    "a write in gathered parameters without a rank": (lambda: Small(on_train_batch_end=enlarge), {}),
    # An update that begins within backward has what was written to parameters that a validation has left whole.
    "writes after a validation": (
        lambda: Small(validation_step=run_all, on_validation_end=halve),
        {"overlap": "backward"},
    ),
    "writes of data after a validation": (
        lambda: Small(validation_step=run_all, on_validation_end=partial(halve, by_data=True)),
        {"overlap": "backward"},
    ),
    "a class of the user's own": (
        changed(
            lambda module: setattr(module, "factor", Scale(torch.ones(4))),
            term=lambda module: 0.1 * module.factor.scaled().sum(),
            on_train_batch_end=lambda module: float(module.factor.scaled().sum()),
        ),
        {},
    ),
    "parameters as inputs of modules": (
        changed(
            add_users_of_parameters,
            term=use_parameters,
            on_train_batch_end=lambda module: float(module.act(module.gate).sum() + module.parts(module.gate)[2]),
        ),
        {"zero": NOTHING_PERSISTS},
    ),
    "a read beside a slow update": (
        changed(train_biases_slowly, on_train_batch_end=read_together),
        {"overlap": "forward"},
    ),
    "another thread reads between steps": (
        changed(add_gate, term=threads_are_refused, on_train_batch_end=read_by_thread),
        {"zero": NOTHING_PERSISTS},
    ),
    "a function of the user's own takes clones": (changed(add_gate, term=squares), {}),
}


@pytest.mark.parametrize("name", AS_IN_MEMORY)
def test_it_trains_as_in_memory(name: str, tmp_path: Path) -> None:
    """Losses, what hooks see and the weights at the end are those of a fit in memory.

    Within forward another thread is refused, whatever it would gather by.
    """
    make, settings = AS_IN_MEMORY[name]
    assert_as_in_memory(tmp_path, make, SmartInfinityStrategy(tmp_path / "s", **settings), max_epochs=3)


def test_parameters_answer_after_the_fit_and_before_the_next(tmp_path: Path) -> None:
    """What is written between two fits is where the second begins."""
    assert_as_in_memory(tmp_path, Small, between=halve)


def test_gradients_are_gone_after_the_step(tmp_path: Path) -> None:
    """They are None then; a kept one raises."""
    kept: list[Any] = []

    def look(module: Small) -> float:
        with pytest.warns(UserWarning, match="read gradients between backward and step"):
            assert all(param.grad is None for param in module.parameters())
        with pytest.raises(UnsupportedError, match="a step has used it"):
            kept[-1].sum()
        return -1.0

    module = Small(on_after_backward=lambda module: kept.append(module.net[0].weight.grad), on_train_batch_end=look)
    assert -1.0 in fitted(tmp_path, module).seen


IN_HOOKS: dict[str, tuple[Callable[[Small], object], type[Exception], str]] = {
    "data of another shape": (
        lambda module: setattr(module.net[0].weight, "data", torch.zeros(2, 2)),
        UnsupportedError,
        r"given the shape \(2, 2\)",
    ),
    "resize_": (lambda module: module.net[0].weight.data.resize_(2, 2), UnsupportedError, ""),
    "set_": (lambda module: module.net[0].weight.data.set_(torch.zeros(2)), UnsupportedError, ""),
    "t_": (torch.no_grad()(lambda module: module.net[0].weight.t_()), UnsupportedError, "another shape"),
    "a parameter of a parameter": (lambda module: nn.Parameter(module.net[0].weight), UnsupportedError, CLONE),
    "vmap": (lambda module: torch.vmap(torch.norm)(module.net[0].weight), UnsupportedError, CLONE),
    "jacrev": (
        lambda module: torch.func.jacrev(lambda x: module.net[0].weight @ x)(torch.ones(8)),
        UnsupportedError,
        CLONE,
    ),
    "a write with a graph": (lambda module: module.net[0].weight.mul_(2), RuntimeError, "leaf Variable"),
    # DeepSpeed would train with it.
    "a gradient of another shape": (
        lambda module: setattr(module.net[0].weight, "grad", torch.ones(8, 32)),
        UnsupportedError,
        r"gradient of shape \(8, 32\)",
    ),
    "a gradient of a frozen parameter": (
        lambda module: setattr(module.net[4].weight, "grad", torch.ones(1, 32)),
        UnsupportedError,
        "not being trained",
    ),
    # It would crash in the next operation.
    "the data of a tensor outside": (
        lambda module: setattr(torch.zeros(32, 8), "data", module.net[0].weight.data),
        RuntimeError,
        "incompatible tensor type",
    ),
}


def test_what_would_spoil_a_parameter_is_refused(tmp_path: Path) -> None:
    """Parameters keep shape and memory, whatever a hook does between steps, and train on as in memory."""

    def try_all(module: Small) -> None:
        if isinstance(module.trainer.strategy, SmartInfinityStrategy):
            for act, error, match in IN_HOOKS.values():
                with torch.enable_grad(), pytest.raises(error, match=match):
                    act(module)
            tried.append(True)

    tried: list[bool] = []
    make = changed(lambda module: module.net[4].weight.requires_grad_(False), on_train_batch_end=try_all)
    assert_as_in_memory(tmp_path, make)
    assert tried


def test_gradients_in_fp16_have_no_loss_scale(tmp_path: Path) -> None:
    """Clipping by hand in fp16 sees the norms of fp32, and trains as with them. DeepSpeed's own functions scale."""

    class Clipping(Small):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            for param in self.net.parameters() if hasattr(self.net[0].weight, "ds_id") else ():
                scaled = param.grad * self.trainer.strategy.optimizers[0].loss_scale
                torch.testing.assert_close(safe_get_full_grad(param), scaled, equal_nan=True)
                safe_set_full_grad(param, safe_get_full_grad(param))
            norm = float(nn.utils.clip_grad_norm_(self.net.parameters(), 0.05))
            if norm < 1e3:  # a skipped step has infinite ones
                self.seen.append(norm)

    strategy = SmartInfinityStrategy(tmp_path / "s", zero=NOTHING_PERSISTS, initial_scale_power=8)
    ours = fitted(tmp_path, Clipping(), strategy, precision="16-mixed")
    assert ours.seen == pytest.approx(fitted(tmp_path, Clipping(), "auto").seen, rel=0.05)


def test_a_change_that_16_bit_rounds_is_warned_of(tmp_path: Path) -> None:
    """A whole parameter in bf16 is changed by torch itself."""

    @torch.no_grad()
    def change(layer: nn.Linear, args: Any) -> None:
        layer.weight.mul_(0.999)

    module = Small()
    module.net[0].register_forward_pre_hook(change)
    with pytest.warns(UserWarning, match=r"Write to param\.data instead"):
        fitted(tmp_path, module, precision="bf16-mixed")


@pytest.mark.parametrize("strategy", ["auto", None])
def test_a_weight_that_a_graph_needs_is_not_changed(strategy: Any, tmp_path: Path) -> None:
    """Torch finds out, as in memory, that a weight was written between forward and backward; not so by ``data``."""

    @torch.no_grad()
    def change(module: Small, *, by_data: bool = False) -> torch.Tensor:
        weight = module.net[4].weight
        (weight.data if by_data else weight).mul_(0.5)
        return torch.zeros(())

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fitted(tmp_path, Small(term=change), strategy)
    fitted(tmp_path / "data", Small(term=lambda module: change(module, by_data=True)), strategy)


def sum_of_gathered(module: Small) -> Any:
    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return sum(param.pow(2).sum() for param in module.parameters())


def add_positions(module: Small) -> torch.Tensor:
    norm = nn.functional.layer_norm
    return norm(module.net[0](torch.ones(2, 8).bfloat16()) + torch.arange(32).float(), (32,), module.net[0].bias).mean()


@pytest.mark.parametrize(
    ("term", "precision", "named"),
    [
        (sum_of_gathered, "32-true", r"outside of deepspeed\.zero\.GatheredParameters"),  # backward finds no weights
        # Torch does not ask parameters that it is given.
        (
            lambda module: squares(module, lambda param: param),
            "32-true",
            r"torch\.autograd\.Function of your own param\.clone\(\)",
        ),
        # Autocast would cast a table in memory.
        (add_positions, "bf16-mixed", r"dtypes of its inputs.*value\.to\(x\.dtype\)"),
        (
            lambda module: module.net[0].weight.detach().numpy(),
            "bf16-mixed",
            r"BFloat16.*use param\.data\.float\(\)",
        ),
        (
            lambda module: torch.linalg.svdvals(module.net[0].weight),
            "bf16-mixed",
            r"BFloat16.*use param\.data\.float\(\)",
        ),
    ],
)
def test_a_term_that_cannot_be_computed_is_refused(
    term: Callable[[Small], Any], precision: str, named: str, tmp_path: Path
) -> None:
    """The error says what to use instead, also where dtypes do not meet, or torch lacks one in 16 bit."""
    with pytest.raises(UnsupportedError, match=named):
        fitted(tmp_path, changed(add_gate, term=term)(), precision=precision)


def test_data_of_another_parameter_is_copied(tmp_path: Path) -> None:
    """Two parameters cannot have one memory: both are trained, each by itself."""

    def alias(module: Small) -> None:
        module.net[2].bias.data = module.net[0].bias.data
        assert torch.equal(module.net[2].bias, module.net[0].bias)

    module = fitted(tmp_path, Small(on_train_start=alias))
    assert not torch.equal(module.net[2].bias, module.net[0].bias)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_write_that_fails_leaves_the_parameter_as_it_was(precision: str, tmp_path: Path) -> None:
    """After the error the parameter and its master still hold the same value."""
    module = fitted(tmp_path, Small(), precision=precision)
    optimizer, weight = module.trainer.strategy.optimizers[0], module.net[2].weight
    before = safe_get_full_fp32_param(weight)
    testing.inject(optimizer.update.drained_handler()._device._pipeline, fail_write_at=0)
    with pytest.raises(StorageError), deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(7.0)
    with deepspeed.zero.GatheredParameters([weight]):
        assert torch.equal(weight, before.to(weight.dtype))
    assert torch.equal(safe_get_full_fp32_param(weight), before)
