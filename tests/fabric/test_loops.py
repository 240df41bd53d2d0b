"""Operations that a Fabric loop may use between setup and close."""

from __future__ import annotations

import gc
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.utils import safe_set_full_grad
from lightning.fabric import Fabric
from torch import nn

from lightning_smartinfinity import (
    CheckpointError,
    RandomStates,
    SmartInfinityFabricStrategy,
    TopK,
    TransferConfig,
    UnsupportedError,
)
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from tests.fabric.worker import quiet_fabric
from tests.helpers.damage import flip_bit_behind

EPS = 1e-4  # as in tests.helpers.models: a small eps would turn rounding noise into full steps


def build_net(width: int = 16) -> nn.Sequential:
    """Return the same small network every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


def batch(index: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(index))


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    return model(batch(index)).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[Fabric]:
    fabric = quiet_fabric(tmp_path / "storage")
    yield fabric
    fabric.strategy.close()


def set_up(fabric: Fabric, net: nn.Module | None = None, **settings: Any) -> tuple[Any, Any]:
    net = build_net() if net is None else net
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, eps=EPS, **settings))
    return model, optimizer


def losses_of(model: nn.Module) -> list[float]:
    with torch.no_grad():
        return [loss_of(model, index).item() for index in range(3)]


def in_torch(plain: nn.Module | None = None, lr: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a network, or a new one, and an optimizer in memory."""
    plain = build_net() if plain is None else plain
    return plain, torch.optim.AdamW(plain.parameters(), lr=lr, eps=EPS)


def take_steps(fabric: Fabric, ours: tuple[Any, Any], theirs: tuple[nn.Module, Any], num_steps: int = 2) -> None:
    """Take steps by ours and by torch's; assert that the losses are the same afterwards."""
    (model, optimizer), (plain, reference) = ours, theirs
    for step in range(num_steps):
        fabric.backward(loss_of(model, step), model=model)
        loss_of(plain, step).backward()
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    torch.testing.assert_close(losses_of(model), losses_of(plain), atol=2e-5, rtol=0)


def take_steps_by_ours(fabric: Fabric, model: Any, optimizer: Any, num_steps: int = 1) -> None:
    for step in range(num_steps):
        fabric.backward(loss_of(model, step), model=model)
        optimizer.step()
        optimizer.zero_grad()


def test_clipping_changes_the_gradients_there_are_as_in_torch(fabric: Fabric) -> None:
    """Clipping by norm and by value works in any order and repeatedly, and later gradients are added unclipped."""
    model, optimizer = set_up(fabric)
    plain, reference = in_torch()
    for step in range(3):
        fabric.backward(loss_of(model, step))
        loss_of(plain, step).backward()
        norms = [fabric.clip_gradients(model, optimizer, max_norm=limit) for limit in (0.3, 0.1, 5.0)]
        expected = [nn.utils.clip_grad_norm_(plain.parameters(), limit) for limit in (0.3, 0.1, 5.0)]
        torch.testing.assert_close(norms, expected)
        fabric.backward(loss_of(model, step + 10))
        loss_of(plain, step + 10).backward()
        fabric.clip_gradients(model, optimizer, clip_val=0.02)
        nn.utils.clip_grad_value_(plain.parameters(), 0.02)
        optimizer.step()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(losses_of(model), losses_of(plain), atol=5e-6, rtol=0)


@pytest.mark.parametrize(("reset", "warned"), [("none", 1), ("optimizer", 0), ("model", 0), ("module", 0)])
def test_steps_without_zero_grad_are_warned_of_once(
    reset: str, warned: int, fabric: Fabric, recwarn: pytest.WarningsRecorder
) -> None:
    """There is no warning if the optimizer, the object that setup returned, or the module resets the gradients."""
    net = build_net()
    model, optimizer = set_up(fabric, net)
    for step in range(3):
        if reset != "none":
            {"optimizer": optimizer, "model": model, "module": net}[reset].zero_grad()
        for part in range(2):
            fabric.backward(loss_of(model, 2 * step + part))
        optimizer.step()
    assert sum("A step came without zero_grad()" in str(each.message) for each in recwarn) == warned


def test_clipping_a_gradient_that_is_not_finite(fabric: Fabric) -> None:
    """Clipping raises torch's error, or returns the norm with error_if_nonfinite=False. The step is skipped."""
    model, optimizer = set_up(fabric)
    before = losses_of(model)
    fabric.backward(loss_of(model, 0) * float("inf"))
    with pytest.raises(RuntimeError, match="non-finite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert not torch.isfinite(fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False))
    fabric.clip_gradients(model, optimizer, clip_val=1.0)
    with pytest.warns(UserWarning, match="A step was skipped"):
        optimizer.step()
    assert optimizer.overflow and losses_of(model) == before


def test_clipping_takes_the_loss_scale_into_account(tmp_path: Path) -> None:
    """In fp16 the returned norm and the limits apply to unscaled gradients."""
    fabric = quiet_fabric(tmp_path, precision="16-true", options={"loss_scale": 2.0**10})
    model, optimizer = set_up(fabric)
    plain = build_net()
    fabric.backward(loss_of(model, 0))
    loss_of(plain, 0).backward()
    norms = [fabric.clip_gradients(model, optimizer, max_norm=limit) for limit in (0.05, 1e9)]
    expected = [nn.utils.clip_grad_norm_(plain.parameters(), limit) for limit in (0.05, 1e9)]
    fabric.clip_gradients(model, optimizer, clip_val=0.01)
    nn.utils.clip_grad_value_(plain.parameters(), 0.01)
    norms.append(fabric.clip_gradients(model, optimizer, max_norm=1e9))
    expected.append(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    torch.testing.assert_close(norms, expected, rtol=2e-3, atol=0)


def test_micro_batches_add_up_in_fp32(tmp_path: Path) -> None:
    """In bf16, too, small gradients add up beside a large one, and the sum is not divided by their number."""
    fabric = quiet_fabric(tmp_path, precision="bf16-true")
    net = nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for value in (1.0, 2.0**-10, 2.0**-10):
        with fabric.no_backward_sync(model):
            fabric.backward(model(torch.tensor([[value]])).sum())
    assert fabric.clip_gradients(model, optimizer, max_norm=1e9).item() == 1.0 + 2.0**-9


def test_zero_grad_drops_what_backward_left(fabric: Fabric) -> None:
    """A step does not use gradients from before zero_grad, and a step without gradients changes nothing."""
    model, optimizer = set_up(fabric)
    before = losses_of(model)
    fabric.backward(loss_of(model, 0))
    optimizer.zero_grad()
    optimizer.step()
    assert losses_of(model) == before
    fabric.backward(loss_of(model, 0))
    optimizer.step()
    assert losses_of(model) != before


@pytest.mark.parametrize("when", ["before setup", "in setup", "after setup"])
def test_scheduler_is_the_loops_own(when: str, fabric: Fabric) -> None:
    """The scheduler acts on the optimizer, whenever it was built, and only the loop steps it."""
    net, theirs = build_net(), in_torch(lr=0.1)
    given = torch.optim.AdamW(net.parameters(), lr=0.1, eps=EPS)
    scheduler: Any = None if when == "after setup" else torch.optim.lr_scheduler.StepLR(given, 1, 0.5)
    if when == "in setup":
        model, optimizer, scheduler = fabric.setup(net, given, scheduler=scheduler)
    else:
        model, optimizer = fabric.setup(net, given)
    if when == "after setup":
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    expected = torch.optim.lr_scheduler.StepLR(theirs[1], 1, 0.5)
    for _ in range(3):
        take_steps(fabric, (model, optimizer), theirs, 1)
        scheduler.step()
        expected.step()
        assert optimizer.param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"]


def test_state_beside_the_model_is_saved_and_loaded(fabric: Fabric, tmp_path: Path) -> None:
    """Numbers, arrays and modules of the loop are restored, from the second save to the path."""
    model, optimizer = set_up(fabric)
    other = nn.Linear(2, 2)
    state = {"model": model, "optimizer": optimizer, "step": 1, "array": batch(1).numpy(), "tensor": batch(2)}
    for step in (1, 2):
        take_steps_by_ours(fabric, model, optimizer)
        fabric.save(tmp_path / "ckpt", {**state, "other": other, "step": step, "kept": "back"})
    expected, weight = losses_of(model), other.weight.detach().clone()
    take_steps_by_ours(fabric, model, optimizer)
    nn.init.zeros_(other.weight)
    target = {**state, "step": 0, "array": None, "tensor": None, "other": other}
    remainder = fabric.load(tmp_path / "ckpt", target, weights_only=False)  # numpy's array is an object of a class
    assert losses_of(model) == expected and torch.equal(other.weight, weight)
    assert target["step"] == 2 and (target["array"] == state["array"]).all()
    assert torch.equal(target["tensor"], state["tensor"]) and remainder == {"kept": "back"}


def test_weights_alone_are_loaded_into_models_with_and_without_optimizer(fabric: Fabric, tmp_path: Path) -> None:
    """A model without an optimizer takes the weights. A training model takes them and keeps its optimizer's state."""
    model, optimizer = set_up(fabric)
    take_steps_by_ours(fabric, model, optimizer, 2)
    fabric.save(tmp_path / "ckpt", {"model": model, "optimizer": optimizer, "step": 2})
    expected = losses_of(model)
    torch.manual_seed(1)
    evaluated = fabric.setup_module(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)))
    assert (
        losses_of(evaluated) != expected
        and fabric.load(tmp_path / "ckpt", {"model": evaluated}) == {"step": 2}
        and losses_of(evaluated) == expected
    )
    take_steps_by_ours(fabric, model, optimizer)
    fabric.load(tmp_path / "ckpt", {"model": model})
    assert losses_of(model) == expected and set(optimizer.engine.optimizer.update.drained_handler().steps) == {3}


def test_plain_weights_reach_the_model_and_its_masters(fabric: Fabric, tmp_path: Path) -> None:
    """load_raw takes a file of torch.save(module.state_dict()), and training continues from these weights.

    It refuses a file with a flipped bit.
    """
    source = build_net()
    nn.init.normal_(source[0].weight)
    torch.save(source.state_dict(), tmp_path / "weights.pt")
    damaged = Path(shutil.copy(tmp_path / "weights.pt", tmp_path / "damaged.pt"))
    flip_bit_behind(source[0].weight.detach().numpy().tobytes()[:16], damaged)
    ours, evaluated = set_up(fabric), fabric.setup(build_net())
    for target in (ours[0], evaluated):
        fabric.load_raw(tmp_path / "weights.pt", target)
        with pytest.raises(CheckpointError, match=r"is damaged: .*CRC"):
            fabric.load_raw(damaged, target)
        torch.testing.assert_close(losses_of(target), losses_of(source))
    take_steps(fabric, ours, in_torch(source), 1)


def test_full_weights_are_loaded_from_one_file(tmp_path: Path) -> None:
    """load_full_weights takes one file with the state's keys, as in Lightning's strategies, but no optimizer.

    It refuses a file with a flipped bit.
    """
    source = build_net()
    nn.init.normal_(source[0].weight)
    torch.save({"model": source.state_dict(), "step": 7, "more": 1}, tmp_path / "whole.pt")
    fabric = quiet_fabric(tmp_path / "storage", options={"load_full_weights": True})
    model, optimizer = set_up(fabric)
    with pytest.raises(UnsupportedError, match="a state with an optimizer"):
        fabric.load(tmp_path / "whole.pt", {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="no weights under 'net'"):
        fabric.load(tmp_path / "whole.pt", {"net": model})
    state = {"model": model, "step": 0}
    assert fabric.load(tmp_path / "whole.pt", state) == {"more": 1} and state["step"] == 7
    inner = optimizer.engine.optimizer
    flip_bit_behind(source[0].weight.detach().numpy().tobytes()[:16], tmp_path / "whole.pt")
    with pytest.raises(CheckpointError, match=r"whole\.pt is damaged: .*CRC"):
        fabric.load(tmp_path / "whole.pt", state)
    for name, param in model.module.named_parameters():
        assert torch.equal(inner.get_full_hp_param(param), source.get_parameter(name).detach()), name


def test_random_states_go_on_where_they_were_saved(fabric: Fabric, tmp_path: Path) -> None:
    """torch, numpy and Python repeat the draws that followed the save. Without RandomStates they do not."""

    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    model, optimizer = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "random": RandomStates()}
    draws()
    fabric.save(tmp_path / "ckpt", state)
    expected = draws()
    fabric.load(tmp_path / "ckpt", {"model": model, "optimizer": optimizer})
    assert draws() != expected
    fabric.load(tmp_path / "ckpt", state)
    assert draws() == expected


def test_random_states_of_other_processes_are_left_out() -> None:
    """A warning says that the draws differ, and the generators stay unchanged."""
    saved = {**RandomStates().state_dict(), "world_size": 2}
    torch.rand(())
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="saved by 2 processes and is resumed by 1"):
        RandomStates().load_state_dict(saved)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.seam("SmartInfinityFabricStrategy runs it in `fabric.backward`", "DeepSpeedStrategy._deepspeed_engine.")
def test_a_second_model_evaluates_beside_the_one_that_trains(fabric: Fabric) -> None:
    """Setting up a second model changes nothing for the first, and training leaves the second unchanged."""
    teacher = fabric.setup_module(build_net())
    model, optimizer = set_up(fabric)
    second = fabric.setup(build_net())
    expected = losses_of(teacher)
    take_steps_by_ours(fabric, model, optimizer)
    assert losses_of(teacher) == losses_of(second) == expected and losses_of(model) != expected


def test_inputs_and_outputs_of_a_model_in_fp32_keep_their_dtype(fabric: Fabric) -> None:
    """As in Fabric's own 32-true, a double stays a double, and 16 bits stay 16 bits."""
    model = fabric.setup(nn.Identity())
    for dtype in (torch.float64, torch.bfloat16):
        assert model(torch.ones(2, dtype=dtype)).dtype is dtype


@pytest.mark.parametrize("precision", ["bf16-true", "16-mixed"])
def test_a_model_evaluates_in_sixteen_bit(precision: str, tmp_path: Path) -> None:
    """A model without an optimizer runs in 16 bit on a CPU."""
    fabric = quiet_fabric(tmp_path, precision=precision)
    torch.testing.assert_close(losses_of(fabric.setup(build_net())), losses_of(build_net()), rtol=2e-2, atol=0)


@pytest.mark.parametrize(
    ("empty_init", "zero"),
    [(None, {}), (True, {}), (None, {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0})],
)
def test_model_built_in_init_module_trains_like_any(
    empty_init: bool | None, zero: dict[str, Any], tmp_path: Path
) -> None:
    """ZeRO-3 partitions every layer as it is built, into storage if it is asked to, and training gives the same."""
    fabric = quiet_fabric(tmp_path, options={"zero": zero})
    with fabric.init_module(empty_init=empty_init):
        net = build_net(256)  # a weight takes a block at least
    assert all(p.ds_status.name == "NOT_AVAILABLE" for p in net.parameters())  # type: ignore[attr-defined]
    ours = set_up(fabric, net)
    assert (fabric.strategy.parameter_bytes > 0) == bool(zero)  # type: ignore[attr-defined]
    take_steps(fabric, ours, in_torch(build_net(256)))


def test_tensors_of_init_tensor_are_whole(tmp_path: Path) -> None:
    """Tensors and a module built there have the precision's dtype and are not partitioned."""
    fabric = quiet_fabric(tmp_path, precision="bf16-true")
    with fabric.init_tensor():
        tensor, net = torch.ones(3), build_net()
    assert (
        tensor.dtype is torch.bfloat16
        and tensor.numel() == 3
        and {(param.dtype, hasattr(param, "ds_id")) for param in net.parameters()} == {(torch.bfloat16, False)}
    )


def test_traffic_counts_until_the_storage_is_closed(fabric: Fabric, tmp_path: Path) -> None:
    """Counters and sizes work as in the Trainer. close() removes the state, and a model can be set up again."""
    strategy, numel = fabric.strategy, sum(p.numel() for p in build_net().parameters())
    assert isinstance(strategy, SmartInfinityFabricStrategy)
    for _ in range(2):
        assert strategy.traffic().shared_read_bytes == 0
        take_steps_by_ours(fabric, *set_up(fabric))
        strategy.drain()
        assert (
            strategy.traffic().shared_read_bytes >= 8 * numel
            and strategy.state_numel == numel
            and strategy.state_bytes >= 24 * numel
            and list((tmp_path / "storage").glob("*/*/state.bin"))
        )
        strategy.close()
        assert not list((tmp_path / "storage").glob("*/*"))
        fabric._models_setup = 0


def test_a_forgotten_fabric_does_not_hold_its_folder(tmp_path: Path) -> None:
    """A function that trains without close can be called twice in one process."""

    def call() -> list[float]:
        fabric = quiet_fabric(tmp_path)
        model, optimizer = set_up(fabric)
        take_steps_by_ours(fabric, model, optimizer)
        return losses_of(model)

    gc.disable()
    try:
        assert call() == call()
    finally:
        gc.enable()
        gc.collect()


def of_the_input(model: Any, batch: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
    return model(batch).square().mean() + gradient.square().mean()  # type: ignore[no-any-return]


def of_a_graph_that_is_used_again(model: Any, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return loss * float(gradients[0].norm())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("loss_of", "directly"), [(of_the_input, True), (of_a_graph_that_is_used_again, False)])
def test_gradients_of_what_a_model_returns(
    loss_of: Callable[[Any, torch.Tensor], torch.Tensor], directly: bool, tmp_path: Path
) -> None:
    """torch.autograd.grad works on it as in memory, and so does loss.backward()."""
    losses = []
    for strategy in ("auto", SmartInfinityFabricStrategy(tmp_path, zero={"stage3_param_persistence_threshold": 0})):
        fabric = quiet_fabric(strategy=strategy)
        model, optimizer = set_up(fabric)
        found = []
        for step in range(6):
            optimizer.zero_grad()
            loss = loss_of(model, batch(step).requires_grad_())
            found.append(float(loss.detach()))
            if directly:
                loss.backward()  # type: ignore[no-untyped-call]
            else:
                fabric.backward(loss)
            optimizer.step()
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def loss_of_rows(model: Any) -> torch.Tensor:
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    return model(batch).square().mean()  # type: ignore[no-any-return]


def compressed_step(root: Path, **options: Any) -> tuple[Fabric, Any]:
    """Take a step with compressed gradients of a model of two layers, and return the Fabric and the model."""
    transfer = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)
    fabric = quiet_fabric(root, options={"compression": TopK(0.05), "transfer": transfer, **options})
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(64, 200), torch.nn.Tanh(), torch.nn.Linear(200, 8))
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=1e-2))
    fabric.backward(loss_of_rows(model))
    optimizer.step()
    optimizer.zero_grad()
    return fabric, model


def residual_of(fabric: Any) -> torch.Tensor:
    fabric.strategy.drain()
    return fabric.strategy._training_optimizer.rank_state.compressed.residual.clone()  # type: ignore[no-any-return]


def set_gradient(model: Any) -> None:
    safe_set_full_grad(model.module[0].weight, torch.ones(200, 64))


def go_backward_elsewhere(model: Any) -> None:
    loss_of_rows(model.module).backward()  # type: ignore[no-untyped-call]  # bypasses the engine: the step would refuse it


@pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain")
@pytest.mark.parametrize("write", [set_gradient, go_backward_elsewhere])
def test_gradients_that_come_beside_the_update(
    write: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The residual comes from the gradients of the step in flight, not from those that replace them."""
    monkeypatch.setattr(GradientPath, "bypasses_buckets", False)  # as on a GPU, or with several processes
    expected, _ = compressed_step(tmp_path / "expected", overlap="none")
    fabric, model = compressed_step(tmp_path / "overlapped", overlap="forward", zero={"reduce_bucket_size": 13_000})
    write(model)
    assert torch.equal(residual_of(fabric), residual_of(expected)) and residual_of(expected).any()
