"""Partitioned parameters at their edges: updates in flight, budgets, writes within forward, after the fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn

from lightning_smartinfinity import SmartInfinityStrategy, TransferConfig, UnsupportedError
from lightning_smartinfinity.zero3.parameters import gather_methods, operations, param_swapper
from lightning_smartinfinity.zero3.parameters.status import Status
from tests.helpers import native_testing as testing
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT
from tests.training.small import Hook, Small


def fitted(root: Path, module: Small, strategy: Any = None, **settings: Any) -> Small:
    """Fit for an epoch in fp32 by our strategy, or by another."""
    strategy = SmartInfinityStrategy(root / "storage") if strategy is None else strategy
    options = {"max_epochs": 1, "precision": "32-true", "use_distributed_sampler": False, "num_sanity_val_steps": 0}
    quiet_trainer(root, strategy, **{**options, **settings}).fit(module)
    return module


def assert_as_in_memory(root: Path, make: Callable[[], Small]) -> None:
    """Assert that a fit sees what a fit in memory sees, and ends with the same weights."""
    ours, theirs = fitted(root, make()), fitted(root, make(), "auto")
    assert ours.seen == pytest.approx(theirs.seen, rel=1e-5)
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own.detach().clone(), other.detach())


def test_a_read_waits_for_the_update_whatever_is_gathered_with_it(tmp_path: Path) -> None:
    """A trained bias beside a frozen weight, gathered together, has its new value, also in the next forward."""

    class Biases(Small):
        def __init__(self, **hooks: Hook) -> None:
            super().__init__(**hooks)
            for name, param in self.named_parameters():
                param.requires_grad_("bias" in name)

    def slow_down(module: Small) -> None:
        if isinstance(module.trainer.strategy, SmartInfinityStrategy):
            optimizer = module.trainer.strategy._training_optimizer
            assert optimizer is not None
            testing.inject(optimizer.update.drained_handler()._device._pipeline, max_delay_us=50_000)  # type: ignore[attr-defined]

    def read(module: Small) -> float:
        both = [module.net[0].weight, module.net[0].bias]
        return float(torch.cat([param.detach().flatten() for param in both]).sum())

    make = lambda: Biases(on_train_start=slow_down, on_train_batch_end=read)  # noqa: E731
    results = [
        fitted(tmp_path / str(number), make(), strategy).seen
        for number, strategy in enumerate([SmartInfinityStrategy(tmp_path / "s", overlap="forward"), "auto"])
    ]
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_a_penalty_gathers_one_parameter_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gathers no list of parameters, in forward and in backward, and leaves none gathered."""
    numbers: list[int] = []
    original = operations.gathered
    module = Small(term=lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()))

    @contextmanager
    def counted(params: Any, written: Any = ()) -> Iterator[None]:
        before = [param.ds_status is ZeroParamStatus.AVAILABLE for param in module.parameters()]
        numbers.append(len(params))
        with original(params, written):
            yield
        assert before == [param.ds_status is ZeroParamStatus.AVAILABLE for param in module.parameters()]

    monkeypatch.setattr(operations, "gathered", counted)
    zero = {"offload_param": {"device": "nvme"}}
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=zero, transfer=TransferConfig(parameter_bytes="16KB"))
    fitted(tmp_path, module, strategy)
    assert set(numbers) == {1} and len(numbers) >= 4 * len(list(module.parameters()))


def test_a_penalty_stays_within_the_budget_of_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with a penalty over all parameters never has more of them gathered than the budget and two layers."""
    budget, most = 64 << 10, [0, 0]
    whole: dict[int, int] = {}
    switch, restore = Status.__set__, gather_methods.restore_classes
    lend = param_swapper.lent_tensor

    def note(param: Any) -> None:
        is_gathered = param.ds_status is not ZeroParamStatus.NOT_AVAILABLE
        whole[param.ds_id] = param.ds_numel * param.element_size() if is_gathered else 0
        most[0] = max(most[0], sum(whole.values()))

    def switching(status: Any, param: Any, value: ZeroParamStatus) -> None:
        switch(status, param, value)
        note(param)

    def restoring(params: list[Any]) -> None:
        restore(params)
        for param in params:
            note(param)

    def noted(pool: Any, nbytes: int) -> torch.Tensor:
        tensor = lend(pool, nbytes)
        most[1] = max(most[1], pool.nbytes)
        return tensor

    module = Small(term=lambda m: 0.01 * sum(p.pow(2).sum() for p in m.net.parameters()))
    layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
    module.net = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))
    monkeypatch.setattr(Status, "__set__", switching)
    monkeypatch.setattr(gather_methods, "restore_classes", restoring)
    monkeypatch.setattr(param_swapper, "lent_tensor", noted)
    transfer = TransferConfig(parameter_bytes=budget)
    strategy = SmartInfinityStrategy(tmp_path / "s", zero={"offload_param": {"device": "nvme"}}, transfer=transfer)
    fitted(tmp_path, module, strategy)
    sizes = sorted(param.numel() * param.element_size() for param in module.parameters())
    assert sum(sizes) > 2 * (budget + sum(sizes[-2:]))
    assert sizes[-1] <= most[0] <= budget + sum(sizes[-2:]) and 0 < most[1] <= budget


def test_a_module_writes_its_weight_within_forward(tmp_path: Path) -> None:
    """A weight that is normalized under no_grad in forward stays normalized, by itself and by ``data``."""

    class Normalized(nn.Linear):
        by_data = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training:
                with torch.no_grad():
                    weight = self.weight.data if self.by_data else self.weight
                    weight.copy_(nn.functional.normalize(self.weight.detach(), dim=1))
            return super().forward(x)

    for by_data in (False, True):

        def make(by_data: bool = by_data) -> Small:
            module = Small(on_train_batch_end=lambda m: float(m.net[2].weight.detach().norm(dim=1).max()))
            module.net[2].__class__, module.net[2].by_data = Normalized, by_data  # type: ignore[assignment]
            return module

        assert_as_in_memory(tmp_path / str(by_data), make)


def test_parameters_are_read_and_written_in_inference_mode(tmp_path: Path) -> None:
    """Validation, which runs in inference mode, reads and writes, after a forward of a part of the model."""

    def swap(module: Small) -> float:
        kept = [param.detach().clone() for param in module.parameters()]
        for param in module.parameters():
            param.data.mul_(0.5)
        half = float(sum(param.double().abs().sum() for param in module.parameters()))
        for param, value in zip(module.parameters(), kept, strict=True):
            param.data.copy_(value)
        return half

    assert_as_in_memory(tmp_path, lambda: Small(on_validation_epoch_end=swap))


def test_all_are_gathered_after_a_validation_of_a_part(tmp_path: Path) -> None:
    """GatheredParameters waits for what ZeRO-3 has begun to gather ahead."""

    def gather(module: Small) -> float:
        params = list(module.parameters())
        if not hasattr(params[0], "ds_id"):
            return float(sum(param.abs().sum() for param in params))
        with deepspeed.zero.GatheredParameters(params):
            return float(sum(param.abs().sum() for param in params))

    assert_as_in_memory(tmp_path, lambda: Small(on_validation_epoch_end=gather))


def test_parameters_answer_after_the_fit_and_before_the_next(tmp_path: Path) -> None:
    """What is written between two fits is where the second begins."""
    results = []
    for strategy in (None, "auto"):
        module = fitted(tmp_path / str(strategy), Small(), strategy)
        with torch.no_grad():
            for param in module.parameters():
                param.mul_(0.5)
        again = fitted(tmp_path / str(strategy), module, strategy and "auto")
        results.append([*again.seen, float(sum(param.detach().abs().sum() for param in again.parameters()))])
    assert results[0] == pytest.approx(results[1], rel=1e-5)


def test_what_is_written_in_gathered_parameters_without_a_rank_lasts(tmp_path: Path) -> None:
    """In one process no rank has other values."""

    def double(module: Small) -> None:
        params = list(module.net[2].parameters())
        if hasattr(params[0], "ds_id"):
            with deepspeed.zero.GatheredParameters(params), torch.no_grad():
                params[0].mul_(2)
        else:
            with torch.no_grad():
                params[0].mul_(2)

    assert_as_in_memory(tmp_path, lambda: Small(on_train_batch_end=double))


def test_gradients_are_gone_after_the_step(tmp_path: Path) -> None:
    """They are None then; a kept one raises."""

    def look(module: Small) -> None:
        with pytest.warns(UserWarning, match="read gradients between backward and step"):
            assert all(param.grad is None for param in module.parameters())
        if "gradient" in vars(module):
            with pytest.raises(UnsupportedError, match="a step has used it"):
                module.gradient.sum()  # type: ignore[operator, union-attr]
            module.seen.append(-1.0)

    class Keeping(Small):
        def on_after_backward(self) -> None:
            vars(self)["gradient"] = self.net[0].weight.grad

    assert -1.0 in fitted(tmp_path, Keeping(on_train_batch_end=look)).seen


def test_a_parameter_keeps_its_shape(tmp_path: Path) -> None:
    """Data of another shape, and operations that would give a parameter other memory, raise."""

    def try_all(module: Small) -> None:
        weight = module.net[0].weight
        with pytest.raises(UnsupportedError, match=r"given the shape \(2, 2\)"):
            weight.data = torch.zeros(2, 2)
        for change in (lambda: weight.data.resize_(2, 2), lambda: weight.data.set_(torch.zeros(2))):
            with pytest.raises(UnsupportedError):
                change()
        for function in (nn.Parameter, torch.vmap(torch.norm), torch.func.jacrev(lambda x: weight @ x)):
            with pytest.raises(UnsupportedError, match=r"param\.(detach\(\)\.)?clone\(\)"):
                function(weight if function is not None and "jac" not in str(function) else torch.ones(8))
        with pytest.raises(UnsupportedError, match="another shape"), torch.no_grad():
            weight.t_()
        with pytest.raises(RuntimeError, match="leaf Variable"), torch.enable_grad():
            weight.mul_(2)
        module.seen.append(-1.0)

    assert -1.0 in fitted(tmp_path, Small(on_train_batch_end=try_all)).seen


def test_gradients_in_fp16_have_no_loss_scale(tmp_path: Path) -> None:
    """Clipping by hand in fp16 sees the norms of fp32, and trains as with them."""

    class Clipping(Small):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            norm = float(nn.utils.clip_grad_norm_(self.net.parameters(), 0.05))
            if norm < 1e3:  # a skipped step has infinite ones
                self.seen.append(norm)

    zero = {"stage3_param_persistence_threshold": 0}
    strategy = SmartInfinityStrategy(tmp_path / "s", zero=zero, initial_scale_power=8)
    ours = fitted(tmp_path, Clipping(), strategy, precision="16-mixed")
    assert ours.seen == pytest.approx(fitted(tmp_path, Clipping(), "auto").seen, rel=0.05)


def test_what_cannot_be_a_gradient_is_refused(tmp_path: Path) -> None:
    """A gradient of another shape, and one of a frozen parameter, raise; DeepSpeed would train with the first."""

    def assign(module: Small) -> None:
        with pytest.raises(UnsupportedError, match=r"gradient of shape \(8, 32\)"):
            module.net[0].weight.grad = torch.ones(8, 32)
        with pytest.raises(UnsupportedError, match="not being trained"):
            module.net[4].weight.grad = torch.ones(1, 32)
        module.seen.append(-1.0)

    module = Small(on_train_batch_end=assign)
    module.net[4].weight.requires_grad_(False)
    assert -1.0 in fitted(tmp_path, module).seen


def test_a_change_that_16_bit_rounds_is_warned_of(tmp_path: Path) -> None:
    """A whole parameter in bf16 is changed by torch itself."""

    def change(layer: nn.Linear, args: Any) -> None:
        with torch.no_grad():
            layer.weight.mul_(0.999)

    module = Small()
    module.net[0].register_forward_pre_hook(change)
    with pytest.warns(UserWarning, match=r"Write to param\.data instead"):
        fitted(tmp_path, module, precision="bf16-mixed")


def test_a_weight_that_a_graph_needs_is_not_changed(tmp_path: Path) -> None:
    """Torch finds out, as in memory, that a weight was written between forward and backward; not so by ``data``."""

    def change(module: Small) -> torch.Tensor:
        with torch.no_grad():
            module.net[4].weight.mul_(0.5)  # type: ignore[operator, union-attr]
        return torch.zeros(())

    def change_data(module: Small) -> torch.Tensor:
        module.net[4].weight.data.mul_(0.5)  # type: ignore[operator, union-attr]
        return torch.zeros(())

    for strategy in ("auto", None):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fitted(tmp_path / str(strategy), Small(term=change), strategy)
        fitted(tmp_path / str(strategy) / "data", Small(term=change_data), strategy)


class Table(nn.Module):
    """A module that returns its parameters within structures."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(3, 8)), nn.Parameter(torch.linspace(0, 1, 8))

    def forward(self) -> Any:
        return self.weight, {"bias": [self.bias]}


class Scale(nn.Parameter):
    """A parameter with a method of its own."""

    def scaled(self) -> torch.Tensor:
        return self * 3.0


def test_a_class_of_the_users_own_keeps_what_it_adds(tmp_path: Path) -> None:
    """A parameter of such a class has its methods in forward and in hooks, partitioned and whole."""

    class Scaled(Small):
        def __init__(self) -> None:
            super().__init__(term=lambda module: 0.1 * module.factor.scaled().sum())
            self.factor = Scale(torch.ones(4))

        def on_train_batch_end(self, *args: object) -> None:
            assert isinstance(self.factor, Scale)
            self.seen.append(float(self.factor.scaled().sum()))

    ours, theirs = (fitted(tmp_path / str(strategy), Scaled(), strategy).seen for strategy in (None, "auto"))
    assert len(ours) > 2 and ours == pytest.approx(theirs, rel=1e-5)


def test_a_parameter_is_the_input_of_a_module(tmp_path: Path) -> None:
    """Losses, activations and layers take parameters of other modules, in hooks and in a term of the loss."""

    class Fed(Small):
        def __init__(self) -> None:
            super().__init__(term=self.use)
            self.gate = nn.Parameter(torch.linspace(-1, 1, 8))
            self.act, self.distance = nn.Softplus(), nn.L1Loss(reduction="sum")
            self.parts = nn.Sequential(nn.LayerNorm(8), nn.Softmax(-1))
            self.table = Table()

        def use(self, module: Any) -> torch.Tensor:
            first, others = self.table()
            total = (
                0.1 * first.sum() * others["bias"][0].sum()
                + self.act(self.gate).sum()
                + self.distance(self.net[0].weight[0], self.gate)
            )
            return 0.1 * total + self.parts(self.gate)[0] + self.net[0](self.gate)[1]  # type: ignore[no-any-return]

        def on_train_batch_end(self, *args: object) -> None:
            self.seen.append(float(self.act(self.gate).sum() + self.parts(self.gate)[2]))

    ours, theirs = (fitted(tmp_path / str(strategy), Fed(), strategy).seen for strategy in (None, "auto"))
    assert len(ours) > 2 and ours == pytest.approx(theirs, rel=1e-5)


def test_another_thread_reads_between_steps_only(tmp_path: Path) -> None:
    """Within forward it is refused, whatever it would gather by, and the training goes on as in memory."""

    def read(module: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(lambda: float(next(module.gate.parameters()).sum())).result(LIMIT)

    def gather(module: Small) -> None:
        with ThreadPoolExecutor(1) as thread:
            params = deepspeed.zero.GatheredParameters(list(module.parameters()))
            thread.submit(params.__enter__).result(LIMIT)

    def refused(module: Any) -> torch.Tensor:
        for use in (read, gather) if hasattr(next(module.parameters()), "ds_id") else ():
            with pytest.raises(UnsupportedError, match="while another thread ran forward"):
                use(module)
        return torch.zeros(())

    def make() -> Small:
        module = Small(term=refused, on_train_batch_end=read)
        module.gate = nn.Linear(4, 4)
        return module

    strategy = SmartInfinityStrategy(tmp_path / "s", zero={"stage3_param_persistence_threshold": 0})
    ours, theirs = fitted(tmp_path / "ours", make(), strategy), fitted(tmp_path / "theirs", make(), "auto")
    assert ours.seen == pytest.approx(theirs.seen, rel=1e-5)


def test_a_tensor_outside_is_not_given_data_without_memory(tmp_path: Path) -> None:
    """Torch refuses it by its kind of device; it would crash in the next operation otherwise."""

    def tie(module: Small) -> None:
        for outside in (nn.Parameter(torch.zeros(32, 8)), torch.zeros(32, 8)):
            with pytest.raises(RuntimeError, match="incompatible tensor type"):
                outside.data = module.net[0].weight.data  # type: ignore[assignment, union-attr]
            assert float(outside.sum()) == 0
        assert module.net[0].weight.data.device == torch.device("cpu")
        module.seen.append(-1.0)

    assert -1.0 in fitted(tmp_path, Small(on_train_batch_end=tie)).seen


@pytest.mark.parametrize("overlap", ["none", "forward", "backward"])
@pytest.mark.parametrize("directly", [True, False])
def test_a_write_after_validation_is_in_the_next_step(overlap: str, directly: bool, tmp_path: Path) -> None:
    """Validation leaves small parameters whole; an update that begins within backward has what was written to them.

    So has what is read of the masters at once.
    """

    class Validated(Small):
        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.net(batch)

        def on_validation_end(self) -> None:
            for param in self.parameters():
                with torch.no_grad():
                    (param if directly else param.data).mul_(0.5)
                if hasattr(param, "ds_id"):
                    assert torch.equal(safe_get_full_fp32_param(param), param)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    norms = []
    for strategy in ("auto", None):
        settings: dict[str, Any] = {"precision": "32-true", "max_epochs": 3, "num_sanity_val_steps": 0}
        trainer = quiet_trainer(tmp_path, strategy, **settings, **({} if strategy else {"overlap": overlap}))
        module = Validated()
        trainer.fit(module)
        norms.append([float(param.detach().norm()) for param in module.parameters()])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_a_term_within_gathered_parameters_is_refused(tmp_path: Path) -> None:
    """Backward finds the parameters partitioned again; the error says to leave the context out."""

    def term(module: Small) -> torch.Tensor:
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            return sum(param.pow(2).sum() for param in module.parameters())  # type: ignore[return-value]

    with pytest.raises(UnsupportedError, match=r"outside of deepspeed\.zero\.GatheredParameters"):
        fitted(tmp_path, Small(term=term))


class Squares(torch.autograd.Function):
    """The sum of the squares of tensors, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return torch.stack([tensor.pow(2).sum() for tensor in tensors]).sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(2 * gradient * tensor for tensor in ctx.saved_tensors)


def test_a_function_of_the_users_takes_clones(tmp_path: Path) -> None:
    """Torch does not ask parameters that it is given; the error says to pass clones, which train as in memory."""

    def make(give: Callable[[nn.Parameter], torch.Tensor]) -> Small:
        module = Small(term=lambda m: Squares.apply(*map(give, m.gate.parameters())))  # type: ignore[no-untyped-call, union-attr]
        module.gate = nn.Linear(4, 4)
        return module

    with pytest.raises(UnsupportedError, match=r"torch\.autograd\.Function of your own param\.clone\(\)"):
        fitted(tmp_path / "given", make(lambda param: param))
    assert_as_in_memory(tmp_path, lambda: make(torch.clone))


def test_dtypes_that_do_not_meet_are_named(tmp_path: Path) -> None:
    """Autocast would cast an fp32 table in memory."""

    class Positions(Small):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(32)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.norm(self.net[0](batch) + torch.arange(32).float()).float().mean()  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match=r"dtypes of its inputs.*value\.to\(x\.dtype\)"):
        fitted(tmp_path, Positions(), precision="bf16-mixed")
    for read in (lambda weight: weight.detach().numpy(), torch.linalg.svdvals):  # which torch lacks
        with pytest.raises(UnsupportedError, match=r"BFloat16.*use param\.data\.float\(\)"):
            fitted(tmp_path, Small(term=lambda m, read=read: read(m.net[0].weight)), precision="bf16-mixed")  # type: ignore[misc]


def test_data_of_another_parameter_is_copied(tmp_path: Path) -> None:
    """Two parameters cannot have one memory: both are trained, each by itself."""

    def alias(module: Small) -> None:
        if not module.seen:
            module.net[2].bias.data = module.net[0].bias.data  # type: ignore[union-attr]
            assert torch.equal(module.net[2].bias, module.net[0].bias)  # type: ignore[arg-type]

    module = fitted(tmp_path, Small(on_train_start=alias))
    assert not torch.equal(module.net[2].bias, module.net[0].bias)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "join", [nn.utils.parameters_to_vector, lambda params: torch.cat([p.flatten() for p in params])]
)
def test_parameters_are_joined_one_at_a_time(join: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """A term of the loss over one vector of all parameters works with a budget that holds only a few."""
    seen = []
    for strategy in ("auto", None):
        module = Small(term=lambda m: 0.01 * join(m.net.parameters()).pow(2).sum())
        layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.Tanh())]
        module.net = nn.Sequential(nn.Linear(8, 64), *layers, nn.Linear(64, 1))
        stored: Any = {
            "zero": {"offload_param": {"device": "nvme"}},
            "transfer": TransferConfig(parameter_bytes=64 << 10),
        }
        fitted(tmp_path, module, strategy or SmartInfinityStrategy(tmp_path / "s", **stored))
        seen.append(module.seen)
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)
