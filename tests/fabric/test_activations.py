"""Activations on storage in a user's own loop."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partitioned_param_coordinator import InflightParamRegistry

from lightning_smartinfinity import StorageError
from lightning_smartinfinity.activations.packing import Packing
from lightning_smartinfinity.activations.pool import Pool
from lightning_smartinfinity.activations.reads import Reads
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.activations.writes import Writes
from lightning_smartinfinity.storage.tensors.tensor_store import TensorStore
from tests.activations.chains import assert_nothing_is_left
from tests.fabric.worker import quiet_fabric
from tests.helpers import native_testing as testing
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.offloaded import EVERYTHING
from tests.helpers.waiting import await_that


class Loop:
    """A loop of one batch, whose model's forward is offloaded."""

    def __init__(
        self,
        root: Path,
        activations: Any = EVERYTHING,
        model: torch.nn.Module | None = None,
        *,
        overlap: str = "none",
    ) -> None:
        recipe = Recipe()
        self.batch = recipe.batch(0)
        self.fabric = quiet_fabric(
            root,
            precision="32-true",
            options={"activations": activations, "overlap": overlap, "zero": {"stage3_param_persistence_threshold": 0}},
        )
        module = recipe.build_model() if model is None else model
        self.model, self.optimizer = self.fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
        self.losses: list[float] = []

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch)
        self.losses.append(float(loss.detach()))
        return loss

    def step(self) -> None:
        self.fabric.backward(self.forward(), model=self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def activations(self) -> Any:
        return self.optimizer.engine.optimizer.rank_state.activations

    def close(self) -> None:
        self.fabric.strategy.close()  # type: ignore[attr-defined]


# Methods, and which call of them is interrupted.
PLACES: list[tuple[Any, str, int]] = [
    (Packing, "pack", 12),
    (Pool, "take", 1),
    (Writes, "_finish", 2),
    (ActivationStore, "end", 1),
    (Packing, "unpack", 1),
    (Reads, "have_in_memory", 3),
    (TensorStore, "_start", 30),
    (InflightParamRegistry, "__setitem__", 1),
    (partition_parameters.NoGatherCoalescedHandle, "wait", 4),
]


@pytest.mark.parametrize("overlap", long_but(["forward"], ["none", "forward"]))
def test_interrupts(overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that catches Ctrl-C, drops the gradients and goes on trains to the same bits, and nothing is left."""
    straight, loop = Loop(tmp_path / "straight", None, overlap=overlap), Loop(tmp_path / "ours", overlap=overlap)
    straight.step()
    loop.step()
    for owner, name, number in PLACES:
        with monkeypatch.context() as patch:
            interrupt_call(patch, owner, name, number)
            with pytest.raises(KeyboardInterrupt):
                loop.fabric.backward(loop.forward(), model=loop.model)
        loop.optimizer.zero_grad()
        del loop.losses[len(straight.losses) :]
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert_nothing_is_left(loop.activations)
        straight.step()
        loop.step()
    assert loop.losses == straight.losses
    straight.close()
    loop.close()
    assert not [path for path in (tmp_path / "ours").rglob("*") if path.is_file()]


def interrupt_call(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Let the call of this number of a method raise KeyboardInterrupt, as Ctrl-C may."""
    method, numbers = getattr(owner, name), itertools.count(1)

    def interrupted(*arguments: Any, **settings: Any) -> Any:
        if next(numbers) == number:
            raise KeyboardInterrupt
        return method(*arguments, **settings)

    patch.setattr(owner, name, interrupted)


def let_a_read_fail(activations: Any) -> bool:
    """Return whether the next read will fail: faults can be injected while no transfer is in flight."""
    try:
        testing.inject(activations._store.files.tensors.core, fail_read_at=0)
    except ValueError:
        return False
    return True


def test_an_unreadable_entry_is_forgotten_with_its_gradients(tmp_path: Path) -> None:
    """The step fails as long as the gradients are there, over accumulation, too, and goes on after zero_grad."""
    straight = Loop(tmp_path / "straight")
    for _ in range(3):
        straight.step()
    straight.close()
    loop = Loop(tmp_path / "failing")
    loop.step()
    loop.activations._notes_failures = True  # as with several processes
    for accumulates in (True, False):
        await_that(lambda: let_a_read_fail(loop.activations))
        loop.fabric.backward(loop.forward(), model=loop.model)
        if accumulates:
            loop.fabric.backward(loop.forward(), model=loop.model)
            with pytest.raises(StorageError, match=r"Entry \d+ of what forward saved"):
                loop.optimizer.step()
        loop.optimizer.zero_grad()
    del loop.losses[1:]
    loop.step()
    loop.step()
    assert loop.losses == straight.losses
    loop.close()


def test_a_released_parameter_is_gathered(tmp_path: Path) -> None:
    """Backward gets the values of a parameter that was saved and then released. The end of the step releases it."""
    loop = Loop(tmp_path)
    weight: Any = loop.optimizer.engine.module.norm.weight
    with loop.activations.forward():
        weight.all_gather()
        kept = weight.detach().clone()
        product: Any = weight * torch.ones(32, requires_grad=True)
    weight.partition()
    assert weight.ds_status.name == "NOT_AVAILABLE" and torch.equal(product.grad_fn._saved_self, kept)
    loop.step()
    assert weight.ds_status.name == "NOT_AVAILABLE"
