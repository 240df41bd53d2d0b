"""The strategy accepts the documented precisions and refuses others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import ConfigError, SmartInfinityPrecision, SmartInfinityStrategy
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("32-true", torch.float32),
        ("bf16-true", torch.bfloat16),
        ("bf16-mixed", torch.bfloat16),
        ("16-true", torch.float16),
        ("16-mixed", torch.float16),
    ],
)
def test_inputs_are_cast_to_the_dtype_of_the_precision(precision: Any, dtype: torch.dtype) -> None:
    """Every documented precision casts inputs to its dtype."""
    assert SmartInfinityPrecision(precision).convert_input(torch.ones(1)).dtype == dtype


@pytest.mark.parametrize("precision", ["64-true", "bf16", 16, None])
def test_other_precisions_are_refused(precision: Any) -> None:
    """The error names the value and lists alternatives."""
    with pytest.raises(ConfigError) as caught:
        SmartInfinityPrecision(precision)
    assert repr(precision) in caught.value.problem
    assert "'bf16-mixed'" in caught.value.remedy


class Sizes(LitTiny):
    """A module that records the element sizes announced before the engine exists and the sizes in use."""

    def on_train_end(self) -> None:
        optimizer = self.trainer.strategy._near_storage_optimizer
        offload, arena = optimizer._offload, optimizer.rank_state.arena
        self.told = (offload.gradient_itemsize, offload.parameter_itemsize)
        self.found = (arena.buffer.element_size(), optimizer.dtype.itemsize)


@pytest.mark.parametrize(
    ("precision", "accumulated", "sizes"),
    long_but(
        [("bf16-mixed", 1, (2, 2)), ("bf16-mixed", 2, (4, 2))],
        [("32-true", 1, (4, 4)), ("bf16-mixed", 1, (2, 2)), ("16-mixed", 1, (2, 2)), ("bf16-mixed", 2, (4, 2))],
    ),
)
def test_sizes_are_known_before_the_engine(
    tmp_path: Path, precision: str, accumulated: int, sizes: tuple[int, int]
) -> None:
    """The sizes are those of gradients, which accumulate in fp32, and of parameters."""
    module = Sizes(Recipe(depth=1, precision=precision))
    strategy = SmartInfinityStrategy(tmp_path)
    fit(module, tmp_path, strategy, max_steps=1, accumulate_grad_batches=accumulated, precision=precision)
    strategy.close()
    assert module.told == module.found == sizes
