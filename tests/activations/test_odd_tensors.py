"""Tensors that few models save: whatever they are, gradients are those without offloading."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from lightning_smartinfinity.activations import OffloadedActivations
from lightning_smartinfinity.activations.geometry import Geometry, spread_out
from tests.activations.models import drop_memory, everything, opened

SIZE = 48


class Keep(torch.autograd.Function):
    """Saves what it is given, ``None`` included, and its output, and uses all of it, what comes first twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *others: torch.Tensor | None) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(x, None, *others, y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, nothing, *others, y = ctx.saved_tensors
        assert nothing is None and torch.equal(ctx.saved_tensors[0], x)
        for other in others:
            if other is not None:
                values = other.to_dense() if other.is_sparse else other
                gradient = gradient + values.to(torch.float32).sum()
        return gradient * x + y, *(None for _ in others)


def empty(x: torch.Tensor) -> torch.Tensor:
    return (x[:, :0].exp().square().sum() + x.exp()).sin()


def sparse(x: torch.Tensor) -> torch.Tensor:
    return Keep.apply(x, torch.eye(SIZE).to_sparse()) + torch.sparse.mm(torch.eye(SIZE).to_sparse(), x.sin())


def sparse_rows(x: torch.Tensor) -> torch.Tensor:
    return Keep.apply(x) + torch.eye(SIZE).to_sparse_csr() @ x.sin()


def eight_bits(x: torch.Tensor) -> torch.Tensor:
    return Keep.apply(x, x.detach().to(torch.float8_e4m3fn), x.detach().to(torch.float8_e5m2).t())


def nested(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor([x[:5], x[5:]], layout=torch.strided)
    return Keep.apply(x, rows.to_padded_tensor(0.0)) + x.sin()


def jagged(x: torch.Tensor) -> torch.Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x.sin(), torch.tensor([0, 5, SIZE]))
    return rows.cos().sin().values()


def scalars(x: torch.Tensor) -> torch.Tensor:
    return x.mean().exp().sin() * x.tanh() * x.mean().cos()


def negated(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x.cos()) * 2
    return z.conj().imag.exp() + (z.conj() * z).real


def views_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:5].mul_(2)
    z = y.sin()  # which saves y, not z
    z[7].add_(1)
    return z.cos()


def forward_mode(x: torch.Tensor) -> torch.Tensor:
    def function(y: torch.Tensor) -> torch.Tensor:
        return (y.sin() @ x).tanh()

    y, slope = torch.func.jvp(function, (x.exp(),), (torch.ones_like(x),))
    return y - slope + Keep.apply(x, torch._efficientzerotensor((SIZE, SIZE)))  # type: ignore[no-untyped-call]


def conjugated_parameter(x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(torch.complex(x.detach().sin(), x.detach()))
    z = torch.complex(x, x.cos())
    return (z @ weight.conj()).abs() + (z @ weight.mH).abs() + (z * weight.t()).abs()


def parameter_with_other_memory(x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(x.detach().sin())
    part = weight[1:]
    weight.data = weight.data * 3
    return (part * x[1:]).sum() + weight[1:] * x[1:].exp()


def parameter_within_a_larger_storage(x: torch.Tensor) -> torch.Tensor:
    weight = nn.Parameter(torch.arange(2.0 * SIZE)[:SIZE])
    return weight.as_strided((SIZE,), (1,), SIZE) * x.exp() + weight * x.sin()


CASES = {
    each.__name__: each
    for each in (
        empty,
        sparse,
        sparse_rows,
        eight_bits,
        nested,
        jagged,
        scalars,
        negated,
        views_in_place,
        forward_mode,
        conjugated_parameter,
        parameter_with_other_memory,
        parameter_within_a_larger_storage,
    )
}


def gradients_of(run: Callable[[torch.Tensor], torch.Tensor], activations: OffloadedActivations | None) -> torch.Tensor:
    """Return the gradients of two backwards each of two forwards, with all memory dropped before the first."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        with nullcontext() if activations is None else activations.forward():
            loss = run(x + 1).sum()
        if activations is not None:
            drop_memory(activations)
        for retained in (True, False):
            loss.backward(retain_graph=retained)
        assert x.grad is not None
        found.append(x.grad)
    return torch.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_gradients(tmp_path: Path, name: str) -> None:
    """They are the same to the bit when everything is read from storage, and nothing is left behind."""
    with opened(tmp_path, everything()) as activations:
        found = gradients_of(CASES[name], activations)
        traffic = activations.traffic()
        assert traffic.read_bytes > 0
        assert activations.storage_bytes == 0
    assert torch.equal(found, gradients_of(CASES[name], None))


def test_compact_copies_where_algorithms_are_deterministic() -> None:
    """Memory before their elements is not used, although torch fills new tensors then."""
    far = 100 << 20  # elements
    values = torch.arange(1024.0)
    before = psutil.Process().memory_info().rss
    torch.use_deterministic_algorithms(True)
    try:
        tensor = spread_out(values.view(torch.uint8), Geometry(torch.float32, (1024,), (1,), far))
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(tensor, values) and tensor.storage_offset() == far
    assert psutil.Process().memory_info().rss - before < far
