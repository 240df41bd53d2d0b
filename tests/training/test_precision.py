"""The strategy accepts the documented precisions and refuses others."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import nn
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
    assert repr(precision) in caught.value.problem
    assert "'bf16-mixed'" in caught.value.remedy


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
    assert module.own == {DTYPES[precision]}
    assert module.tensors == TENSORS[precision]


@pytest.mark.parametrize(("precision", "where"), [("bf16-mixed", "init"), ("16-true", "configure_model")])
def test_dtype_in_fabric(precision: str, where: str, tmp_path: Path) -> None:
    """The LightningModule that Fabric sets up tells it too, built under init_module or before."""
    fabric = quiet_fabric(tmp_path / "storage", precision=precision)
    with fabric.init_module() if where == "configure_model" else nullcontext():
        module = Inner()
    fabric.setup(module, torch.optim.SGD(module.parameters(), lr=1e-3))
    assert {module.dtype, *(param.dtype for param in module.parameters())} == {DTYPES[precision]}
    fabric.strategy.close()
