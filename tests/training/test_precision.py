"""The documented precisions, and no others; running statistics of norms move and are saved as in Lightning's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_smartinfinity import ConfigError, SmartInfinityPrecision
from tests.fabric.worker import quiet_fabric
from tests.helpers.trainers import fit

HALF, LONG = torch.float16, torch.int64


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, HALF, LONG, torch.bool], ids=str)
def test_batches_have_the_dtype_that_lightning_gives_them(precision: Any, dtype: torch.dtype) -> None:
    """Only float tensors that autocast would cast differ: parameters here have 16 bits in mixed precision."""
    theirs: Precision = Precision()
    if precision.endswith("mixed"):
        theirs = MixedPrecision(precision, "cpu")
    elif precision != "32-true":
        theirs = HalfPrecision(precision)
    expected = theirs.convert_input([torch.ones(1, dtype=dtype)])[0].dtype
    if precision.endswith("mixed") and expected.is_floating_point and expected is not torch.float64:
        expected = torch.bfloat16 if precision == "bf16-mixed" else HALF
    (found,) = SmartInfinityPrecision(precision).convert_input([torch.ones(1, dtype=dtype)])
    assert found.dtype is expected


def test_rounded_batches_are_told_once() -> None:
    """A warning names the way around, unless the first batch has every value in 16 bits, too."""
    precision, exact = SmartInfinityPrecision("bf16-mixed"), SmartInfinityPrecision("bf16-mixed")
    batch = {"x": torch.tensor([1.0, 16777.25, float("nan")]), "y": torch.tensor([3])}
    with pytest.warns(UserWarning, match="float64") as caught:
        precision.convert_input(batch)
        precision.convert_input(batch)
        exact.convert_input([torch.tensor([0.5, float("nan")]), torch.tensor(0.1, dtype=torch.float64)])
    assert len(caught) == 1


@pytest.mark.parametrize("precision", ["64-true", "bf16", 16, None])
def test_other_precisions_are_refused(precision: Any) -> None:
    """The error names the value and lists alternatives."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityPrecision(precision)
    assert repr(precision) in caught.value.problem and "'bf16-mixed'" in caught.value.remedy


DTYPES = {
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "bf16-mixed": torch.bfloat16,
    "16-true": torch.float16,
    "16-mixed": torch.float16,
}


# Of a new tensor, and of buffers in fp64 and in fp32, with Lightning's own precisions.
TENSORS = {
    "32-true": [torch.float32, torch.float64, torch.float32],
    "bf16-true": [torch.bfloat16, torch.bfloat16, torch.bfloat16],
    "16-mixed": [torch.float32, torch.float64, torch.float32],
}


class Inner(pl.LightningModule):
    """A LightningModule within another, as in distillation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)  # type: ignore[no-any-return]


class Told(pl.LightningModule):
    """Records the dtypes of a new tensor and of buffers in a step, and those of itself and of its parameters."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.drawn = torch.polar(torch.ones(2), torch.ones(2))
        self.register_buffer("rotations", self.drawn.clone())
        self.register_buffer("table", torch.ones(2, dtype=torch.float64))
        self.register_buffer("means", torch.ones(2))
        self.inner = Inner() if where == "init" else None

    def configure_model(self) -> None:
        self.inner = self.inner or Inner()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert torch.equal(self.rotations, self.drawn)
        self.tensors = [torch.zeros(1).dtype, self.table.dtype, self.means.dtype]
        self.own = {self.dtype, self.inner.dtype, *(param.dtype for param in self.parameters())}
        return self.inner(batch.to(self.dtype)).float().square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(torch.ones(4, 4), batch_size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["init", "configure_model"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-mixed"])
def test_dtypes_in_a_fit(precision: str, where: str, tmp_path: Path) -> None:
    """Modules, inner ones as well, have the dtype of the parameters; new tensors and buffers have those of Lightning.

    Complex buffers keep their values; Lightning's own bf16-true drops their imaginary parts.
    """
    module = Told(where)
    fit(module, tmp_path, precision=precision, max_steps=1)
    assert module.own == {DTYPES[precision]} and module.tensors == TENSORS[precision]


@pytest.mark.parametrize(("precision", "where"), [("bf16-mixed", "init"), ("16-true", "configure_model")])
def test_dtype_in_fabric(precision: str, where: str, tmp_path: Path) -> None:
    """The LightningModule that Fabric sets up tells it too, built under init_module or before."""
    fabric = quiet_fabric(tmp_path / "storage", precision=precision)
    with fabric.init_module() if where == "configure_model" else nullcontext():
        module = Inner()
    fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    assert {module.dtype, *(param.dtype for param in module.parameters())} == {DTYPES[precision]}


# ---- running statistics of norms, and what forward writes


WIDTH = 4
STEPS = 10


class OwnForward(nn.BatchNorm1d):
    """A batch norm that calls torch's function itself, as timm's norms with activations do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.momentum is not None
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(x, mean, var, self.weight, self.bias, self.training, self.momentum).relu()


class Clamped(nn.BatchNorm1d):
    """A batch norm that clamps its weight within forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return super().forward(x)


class Frozen(nn.Module):
    """A batch norm of buffers that nothing updates, as in torchvision and transformers."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in {"weight": 1.5, "bias": 0.5, "running_mean": 20.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((WIDTH,), value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale: torch.Tensor = self.weight * self.running_var.rsqrt()  # type: ignore[operator, union-attr]
        return x * scale + (self.bias - self.running_mean * scale)  # type: ignore[operator]


class Through(nn.Module):
    """Calls a norm in a way of its own."""

    def __init__(self, norm: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.call = norm, call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self.norm, x)


def write(norm: Any, _: object) -> None:
    """Write the weights of a norm by ``data``."""
    norm.weight.data[:2] = 0.7
    norm.bias.data = torch.full((WIDTH,), 0.3)


class Norms(pl.LightningModule):
    """Trains a layer after each kind of norm. Means start at 16, and go to 20 in steps too small for bf16."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norms: dict[str, nn.Module] = {
            "plain": nn.BatchNorm1d(WIDTH, momentum=0.01),
            "without weights": nn.BatchNorm1d(WIDTH, momentum=0.01, affine=False),
            "cumulative": nn.BatchNorm1d(WIDTH, momentum=None),
            "synchronized": nn.SyncBatchNorm(WIDTH, momentum=0.01).eval(),
            "own forward": OwnForward(WIDTH, momentum=0.01),
            "clamped": Clamped(WIDTH, momentum=0.01),
            "written in a hook": nn.BatchNorm1d(WIDTH, momentum=0.01),
            "frozen": Frozen(),
            # Forward runs again in backward.
            "recomputed": Through(
                nn.BatchNorm1d(WIDTH, momentum=0.01), lambda norm, x: checkpoint(norm, x, use_reentrant=False)
            ),
            # Samples are one long sequence.
            "instance": Through(
                nn.InstanceNorm1d(WIDTH, momentum=0.01, affine=True, track_running_stats=True),
                lambda norm, x: norm(x.t()[None]).squeeze(0).t(),
            ),
        }
        self.norms = nn.ModuleDict(norms)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in norms)
        for name, buffer in self.named_buffers():
            if name.endswith("running_mean"):
                buffer.fill_(16)

    def on_fit_start(self) -> None:
        self.norms["written in a hook"].register_forward_pre_hook(write)

    def on_train_batch_start(self, *_: Any) -> None:
        self.norms["synchronized"].eval()  # torch's needs a GPU to train

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        parts = [layer(norm(batch)) for norm, layer in zip(self.norms.values(), self.layers, strict=True)]
        return torch.stack(parts).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> Any:
        data = torch.randn(STEPS * 8, WIDTH, generator=torch.Generator().manual_seed(1)) + 20
        return DataLoader(data.bfloat16().float(), batch_size=8)  # type: ignore[arg-type]


def values_of(module: Norms) -> dict[str, torch.Tensor]:
    """Return copies of the module's buffers, and of the weights that forward writes."""
    written = (module.norms[name].named_parameters(prefix=name) for name in ("clamped", "written in a hook"))
    return {name: value.detach().clone() for name, value in (*module.named_buffers(), *chain(*written))}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, torch.Tensor]]:
    """Return the values of two fits of one module in Lightning's own bf16-mixed."""
    module, root, found = Norms(), tmp_path_factory.mktemp("plain"), []
    for _ in range(2):
        fit(module, root, "auto", max_steps=STEPS)
        found.append(values_of(module))
    return found


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_statistics_are_those_of_lightning(
    precision: str, expected: list[dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """Their dtype is fp32, and they go where they go in memory, also in a second fit of the module.

    What forward writes to the weights of a norm lasts: norms compute with the parameters themselves.
    """
    module, hooks = Norms(), set()
    for once in expected:
        trainer = fit(module, tmp_path, precision=precision, max_steps=STEPS, use_distributed_sampler=False)
        hooks.add(len(module.norms["plain"]._forward_pre_hooks))
        found = values_of(module)
        assert found.keys() == once.keys()
        for name, buffer in once.items():
            torch.testing.assert_close(found[name], buffer, rtol=2e-3, atol=2e-3, msg=lambda m, n=name: f"{n}: {m}")
        trainer.strategy.close()  # type: ignore[attr-defined]
    assert len(hooks) == 1  # the second fit's replace the first one's
