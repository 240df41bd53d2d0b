"""Tensors pass through or are packed, and unpacking restores them; parameters are kept by themselves."""

from __future__ import annotations

import dataclasses
import threading
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_smartinfinity.activations import OffloadedActivations, paused
from lightning_smartinfinity.activations.geometry import Geometry, geometry_of, spread_out
from lightning_smartinfinity.errors import StorageError, UnsupportedError
from tests.activations.models import drop_memory, everything, opened
from tests.helpers.waiting import join

TIGHT = everything(host_bytes=4096, budget_bytes=4096)


class Save(torch.autograd.Function):
    """Saves tensors, and gives those that backward gets to a list."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, found: list[torch.Tensor], *saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*saved)
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        ctx.found += ctx.saved_tensors
        return gradient, None, *(None for _ in ctx.saved_tensors)


def through(activations: OffloadedActivations, make: Callable[[], list[torch.Tensor]], *batch: Any) -> Any:
    """Save tensors that are made in a forward; return copies of them, and what backward gets."""
    x, found = torch.zeros(1, requires_grad=True), list[torch.Tensor]()
    with activations.forward(*batch):
        saved = make()
        loss = Save.apply(x, found, *saved).sum()
    copies = [tensor.detach().clone() if tensor.layout is torch.strided else tensor for tensor in saved]
    described = [geometry_of(tensor) if tensor.layout is torch.strided else None for tensor in saved]
    del saved
    loss.backward()
    return copies, described, found


class Subclass(torch.Tensor):
    """A subclass of tensors."""


@dataclasses.dataclass
class Batch:
    """A batch of a user's own class."""

    inputs: torch.Tensor


def test_what_passes_through(tmp_path: Path) -> None:
    """Parameters, their views, buffers, the batch, small tensors, and all that is no plain tensor are not offloaded."""
    module = nn.BatchNorm1d(2000)
    inputs = torch.randn(2000), torch.randn(2000).t(), torch.randn(2000), torch.randn(2000)
    # As those of transformers' tokenizers, and of a user's own class.
    batch = (0, {"x": [*inputs[:2]]}, UserDict(x=inputs[2]), [Batch(inputs[3])])
    complex_ones = torch.ones(2000, dtype=torch.complex64)
    with opened(tmp_path, everything(min_bytes=4096), module=module) as activations:

        def make() -> list[torch.Tensor]:
            return [
                module.weight,
                module.weight.view(2, 1000).t(),
                module.weight.detach(),
                module.running_mean,
                module.running_mean[100:],
                *inputs,
                inputs[3][1:],
                torch.ones(10),
                torch.ones(1, 1).expand(2000, 2000),
                torch.ones(2000).as_subclass(Subclass),
                complex_ones.conj(),
                torch.eye(2000).to_sparse(),
            ]

        copies, _, found = through(activations, make, batch)
        assert all(torch.equal(one.to_dense(), other.to_dense()) for one, other in zip(copies, found, strict=True))
        assert found[5] is inputs[0] and found[3] is module.running_mean and activations.traffic().saved_bytes == 0


def views() -> list[torch.Tensor]:
    """Return tensors of many layouts, of which several share a storage."""
    base, other, wide = torch.randn(60, 60), torch.randint(0, 99, (40, 50)), torch.randn(300, 40)
    return [
        base,
        base.t(),
        base[3:, 5:50:3],
        base.view(torch.int32),
        other[:1].expand(70, 50),
        other.unfold(0, 5, 1),
        wide[7:20, 3:11],
        wide[7:20, 3:11].t(),
        wide[:, 39:],
        torch.randn(500, dtype=torch.float64)[499:].expand(64),
        torch.randn(30, 30).bfloat16().requires_grad_(),
        torch.randn(20, 20) > 0,
        torch.randn(20, 20, dtype=torch.complex64)[:, 1::2],
    ]


def many_parts() -> list[torch.Tensor]:
    whole = torch.randn(100, 100)
    return [whole[:, start : start + 40] for start in range(10)]


def of_a_parameter() -> list[torch.Tensor]:
    weight = nn.Parameter(torch.randn(40, 50))
    return [weight, weight.t(), weight[3:]]


@pytest.mark.parametrize(
    ("make", "numel", "settings"),
    [
        pytest.param(views, None, everything(), id="views, roomy"),
        pytest.param(views, None, TIGHT, id="views, tight"),
        *(
            pytest.param(make, numel, everything(), id=name)
            for name, make, numel in [
                ("a tenth", lambda: [torch.randn(1000, 100)[:, :10]], 1000 * 10),
                ("less than half", lambda: [torch.randn(1000, 100)[:, :49]], 1000 * 49),
                ("half", lambda: [torch.randn(1000, 100)[:, :50]], 1000 * 100),
                ("many parts", many_parts, 100 * (40 + 40 + 100)),
                ("parts of a projection", lambda: list(torch.randn(64, 96).chunk(3, dim=-1)), 64 * 96),
                ("a parameter that nobody names", of_a_parameter, 0),
            ]
        ),
    ],
)
def test_everything_is_restored(
    tmp_path: Path, make: Callable[[], list[torch.Tensor]], numel: int | None, settings: Any
) -> None:
    """Dtype, size, strides, offset and bits are those of the saved tensor, from the pool and from storage.

    What covers less than half of its storage is stored without the rest, as long as that is less than all. Parameters
    and their views are known by their type, as ZeRO-3 has taken their memory before forward begins.
    """
    with opened(tmp_path, settings) as activations:
        copies, described, found = through(activations, make)
        assert all(map(torch.equal, copies, found)) and list(map(geometry_of, found)) == described
        assert numel is None or activations.traffic().saved_bytes == 4 * numel


def test_a_tensor_that_changed_between_two_saves(tmp_path: Path) -> None:
    """What is saved again after a change is stored again."""
    x, found = torch.zeros(1, requires_grad=True), list[torch.Tensor]()
    with opened(tmp_path) as activations:
        with activations.forward():
            y = torch.arange(1000.0)
            Save.apply(x, [], y)
            y.add_(1)
            loss = Save.apply(x, found, y).sum()
            y.data.mul_(1)
        loss.backward()
        assert torch.equal(found[0], torch.arange(1000.0) + 1) and activations.traffic().deduplicated == 0


def test_storages_at_one_address(tmp_path: Path) -> None:
    """A storage is not taken for the one that was evicted before it."""
    x, found, addresses = torch.zeros(1, requires_grad=True), list[torch.Tensor](), set[int]()
    with opened(tmp_path, everything()) as activations:
        with activations.forward():
            for numel in range(1000, 1020):
                y = torch.arange(float(numel))
                addresses.add(y.untyped_storage()._cdata)
                x = Save.apply(x, found, y)
                del y
        x.sum().backward()
    assert len(addresses) < 20 and all(map(torch.equal, found[::-1], map(torch.arange, range(1000, 1020))))


def released(module: nn.Linear) -> dict[nn.Parameter, torch.Tensor]:
    """Take the data of parameters away, as ZeRO-3 does, and return copies."""
    kept = {}
    for param in module.parameters():
        kept[param], param.data = param.data.clone(), torch.empty(0)
    return kept


def test_a_parameter_that_was_released(tmp_path: Path) -> None:
    """It is gathered when backward wants it, and neither its old memory is kept nor its old values are used."""
    module, gathered = nn.Linear(30, 30), list[nn.Parameter]()
    x = torch.randn(5, 30, requires_grad=True)
    (expected,) = torch.autograd.grad(module(x).exp().sum(), x)
    kept: dict[nn.Parameter, torch.Tensor] = {}

    def gather(param: nn.Parameter) -> None:
        gathered.append(param)
        param.data = kept[param].clone()

    with opened(tmp_path, module=module, gather=gather) as activations:
        found: list[torch.Tensor] = []
        with activations.forward(x):
            loss = module(x).exp().sum() + Save.apply(x, found, module.weight.detach()[1:]).sum() * 0
            alive = StorageWeakRef(module.weight.untyped_storage())
        kept = released(module)
        assert alive.expired()
        loss.backward()
        assert torch.equal(x.grad, expected) and gathered == [module.weight]
        assert torch.equal(found[0], kept[module.weight][1:])


def test_a_released_parameter_that_nobody_gathers(tmp_path: Path) -> None:
    """Backward raises, and names what is missing."""
    module, x = nn.Linear(30, 30), torch.randn(5, 30, requires_grad=True)
    with opened(tmp_path, module=module) as activations:
        with activations.forward(x):
            loss = module(x).exp().sum()
        released(module)
        with pytest.raises(StorageError, match=r"shape \(30, 30\) was released .* Pass gather="):
            loss.backward()


@pytest.mark.parametrize("changed", ["tensor", "parameter"])
@pytest.mark.parametrize("min_bytes", [1, 1 << 20], ids=["offloaded", "too small"])
def test_a_change_in_place_raises(tmp_path: Path, min_bytes: int, changed: str) -> None:
    """What was saved and changed afterwards makes backward raise as autograd does, whether it was offloaded or not."""
    module, x = nn.Linear(30, 30), torch.randn(5, 30, requires_grad=True)
    with opened(tmp_path, everything(min_bytes=min_bytes), module=module) as activations:
        with activations.forward(x):
            y = module(x)
            loss = y.sin().sum()
        with torch.no_grad():
            (y if changed == "tensor" else module.weight).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


class Overwriting(torch.autograd.Function):
    """A function whose backward computes its gradient in the memory of a saved tensor, as some fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        ctx.save_for_backward(y)
        return y.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return gradient * y.exp_() * 2


@pytest.mark.parametrize("keep", [0, 1 << 20], ids=["offloaded", "kept"])
def test_a_change_in_backward_raises_in_the_next(tmp_path: Path, keep: int) -> None:
    """Backward may overwrite what it gets, and a second backward through the same graph raises as in autograd."""
    x = torch.randn(1000, requires_grad=True)
    with opened(tmp_path, everything(keep=keep)) as activations:
        with activations.forward(x):
            loss = Overwriting.apply(x).sum()  # type: ignore[no-untyped-call]
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert torch.equal(found, (x * 2).exp() * 2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, x)


def test_a_backward_within_forward_saves_nothing_here(tmp_path: Path) -> None:
    """What autograd saves while it runs backward passes through."""
    x = torch.randn(1000, requires_grad=True)
    with opened(tmp_path) as activations, activations.forward(x):
        y = (x * 2).exp().sum()
        before = activations.traffic().saved_bytes
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        assert activations.traffic().saved_bytes == before > 0
        gradient.sum().backward()
    assert torch.equal(x.grad, 4 * (x * 2).exp().detach())


def test_code_that_refuses_hooks(tmp_path: Path) -> None:
    """Its error names paused(), in which it works, and behind which tensors are offloaded again."""
    x = torch.randn(1000, requires_grad=True)

    def square(y: torch.Tensor) -> torch.Tensor:
        return y.square().sum()

    with opened(tmp_path) as activations:
        with pytest.raises(UnsupportedError, match=r"refuses hooks: .*paused\(\)"), activations.forward(x):
            torch.func.grad(square)(x)
        with activations.forward(x):
            with paused():
                inner = torch.func.grad(square)(x)
            assert activations.traffic().saved_bytes == 0
            loss = (inner * 3).exp().sum()
        assert activations.traffic().saved_bytes > 0
        loss.backward()
        assert torch.equal(x.grad, 6 * (6 * x).exp().detach())
    with paused():
        assert torch.equal(torch.func.grad(square)(x), 2 * x)


def test_backward_in_other_threads(tmp_path: Path) -> None:
    """Several threads may run backward while another runs forward."""
    x, found = torch.randn(2000, requires_grad=True), list[torch.Tensor]()
    (expected,) = torch.autograd.grad((x * 2).exp().sin().sum(), x)

    def computed() -> torch.Tensor:
        with activations.forward(x):
            return (x * 2).exp().sin().sum()

    def backward(loss: torch.Tensor) -> None:
        found.extend(torch.autograd.grad(loss, x))

    with opened(tmp_path, TIGHT) as activations:
        threads = [threading.Thread(target=backward, args=(computed(),)) for _ in range(3)]
        for thread in threads:
            thread.start()
        last = computed()
        join(*threads)
        backward(last)
    assert len(found) == 4 and all(torch.equal(each, expected) for each in found)


# ---- tensors that few models save: whatever they are, gradients are those without offloading


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
                gradient = gradient + (other.to_dense() if other.is_sparse else other).to(torch.float32).sum()
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
    return torch.nested.nested_tensor_from_jagged(x.sin(), torch.tensor([0, 5, SIZE])).cos().sin().values()


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
    found: list[Any] = []
    for _ in range(2):
        x = torch.randn(SIZE, SIZE, requires_grad=True)
        with nullcontext() if activations is None else activations.forward():
            loss = run(x + 1).sum()
        if activations is not None:
            drop_memory(activations)
        for retained in (True, False):
            loss.backward(retain_graph=retained)
        found.append(x.grad)
    return torch.stack(found)


@pytest.mark.parametrize("name", CASES)
def test_gradients(tmp_path: Path, name: str) -> None:
    """Gradients have the same bits when everything is read from storage, and no file or memory is left."""
    with opened(tmp_path, everything()) as activations:
        found = gradients_of(CASES[name], activations)
        assert activations.traffic().read_bytes > 0 and activations.storage_bytes == 0
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
