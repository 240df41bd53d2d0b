"""Activations on a CUDA device: they give the gradients of autograd alone, and come and go as on the CPU.

The tests of tests/activations run here once more, with tensors on the device.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_smartinfinity.activations.forwards import Plan
from tests.activations.chains import BLOCK, activations, chain
from tests.activations.models import everything, opened
from tests.activations.test_bounds import (
    test_a_full_pool_stops_nothing,
    test_a_tensor_that_is_larger_than_the_pool,
    test_storage_is_bounded,
    test_the_file_does_not_grow_without_end,
    test_the_newest_stay,
)
from tests.activations.test_gradients import (
    test_everything_offloaded,
)
from tests.activations.test_lifetime import (
    test_a_dropped_graph_frees_everything,
    test_a_retained_graph_is_read_again,
    test_an_interrupt_in_backward,
    test_backward_frees_everything,
    test_forward_frees_what_is_offloaded,
)
from tests.activations.test_packing import (
    test_a_change_in_place_raises,
)
from tests.activations.test_transfers import (
    test_each_entry_is_read_once,
    test_what_is_wanted_early_is_forwarded,
)
from tests.helpers.runif import RunIf

__all__ = [
    "activations",
    "test_a_change_in_place_raises",
    "test_a_dropped_graph_frees_everything",
    "test_a_full_pool_stops_nothing",
    "test_a_retained_graph_is_read_again",
    "test_a_tensor_that_is_larger_than_the_pool",
    "test_an_interrupt_in_backward",
    "test_backward_frees_everything",
    "test_each_entry_is_read_once",
    "test_everything_offloaded",
    "test_forward_frees_what_is_offloaded",
    "test_storage_is_bounded",
    "test_the_file_does_not_grow_without_end",
    "test_the_newest_stay",
    "test_what_is_wanted_early_is_forwarded",
]

pytestmark = [RunIf(cuda_devices=1), pytest.mark.usefixtures("on_the_device")]

TIGHT = everything(host_bytes=4 * BLOCK, budget_bytes=6 * BLOCK)


def test_streams_of_the_user(tmp_path: Path) -> None:
    """Forward may change streams between what it packs. What it waits for, our copies wait for."""
    with opened(tmp_path, TIGHT) as offloaded:
        x = torch.randn(BLOCK // 4, requires_grad=True)
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]

        def computed() -> torch.Tensor:
            y = x * 1
            for i in range(10):
                streams[i % 2].wait_stream(torch.cuda.current_stream() if i == 0 else streams[(i + 1) % 2])
                with torch.cuda.stream(streams[i % 2]):
                    y = y.sin() * y
            torch.cuda.current_stream().wait_stream(streams[1])
            return y.sum()

        (expected,) = torch.autograd.grad(computed(), x)
        for _ in range(3):
            with offloaded.forward(x):
                loss = computed()
            (found,) = torch.autograd.grad(loss, x)
            assert torch.equal(found, expected)
        assert offloaded.traffic().offloaded_bytes > 0


@pytest.mark.parametrize("other", ["cpu", pytest.param("cuda:1", marks=RunIf(cuda_devices=2))])
def test_two_places(tmp_path: Path, other: str) -> None:
    """Tensors of two devices may be saved in one forward, and are read back to where they were."""
    with opened(tmp_path, TIGHT) as offloaded:
        leaves = [torch.randn(BLOCK // 4, device=device, requires_grad=True) for device in ("cuda:0", other)]
        expected = torch.autograd.grad([chain(leaf) for leaf in leaves], leaves)
        for _ in range(3):
            with offloaded.forward(leaves):
                losses = [chain(leaf) for leaf in leaves]
            assert all(map(torch.equal, torch.autograd.grad(losses, leaves), expected))
        assert offloaded.traffic().read_bytes > 0


@pytest.mark.parametrize("evicted_first", [True, False])
def test_what_was_changed_before_it_left(tmp_path: Path, evicted_first: bool) -> None:
    """A tensor that was packed, changed and packed again is offloaded as it is then, whenever it is evicted."""
    with opened(tmp_path, everything(keep=4 * BLOCK)) as offloaded:
        for _ in range(3):
            x = torch.randn(BLOCK // 4, requires_grad=True)
            # Newer tensors push the tensor out, and nothing is measured, which would wait for the device.
            offloaded._tuner.plan, offloaded._last = Plan(kept_bytes=4 * BLOCK, chosen_for=BLOCK), None
            with offloaded.forward(x):
                y = x * 1
                unused = y.sin()
                torch.cuda._sleep(10**8)
                y.add_(1)
                loss = chain(x * 2) if evicted_first else y.square().sum()
                loss = loss + (y.square().sum() if evicted_first else chain(x * 2))
                del y
            (found,) = torch.autograd.grad(loss, x)
            y = x * 1 + 1
            (expected,) = torch.autograd.grad(y.square().sum() + chain(x * 2), x)
            assert torch.equal(found, expected)
            del unused


def test_a_captured_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a CUDA graph is captured, everything passes through."""
    with opened(tmp_path) as offloaded:
        x = torch.randn(BLOCK, requires_grad=True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with offloaded.forward(x):
            chain(x).backward()
        assert offloaded.traffic().saved_bytes == 0
