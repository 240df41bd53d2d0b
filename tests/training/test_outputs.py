"""Steps and submodules may return anything, as with other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from tests.helpers.plain import RECIPE, Everything, assert_like_plain_lightning


@dataclass(slots=True)
class Slotted:
    """An object without a dictionary of attributes."""

    value: float


OUTPUTS: dict[str, Any] = {
    "a float": 0.5,
    "an int": 3,
    "text": "text",
    "a bool": True,
    "bytes": b"bytes",
    "a set": {1, 2},
    "an array": np.arange(3.0),
    "a scalar of numpy": np.float32(0.5),
    "an object with slots": Slotted(0.5),
    "a class": Slotted,
    "a dictionary with other keys than text": {0: "zero", (1, 2): 0.5, None: [1]},
    "a list": [1, "text", None],
    "nothing": None,
}


class Returning(Everything):
    """A module whose evaluation returns each of these outputs in turn, also through a submodule."""

    def __init__(self) -> None:
        super().__init__(RECIPE)
        self.seen: list[Any] = []
        self.passing = Passing()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        self.model(batch)
        return self.output(batch_idx)

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.output(batch_idx)

    def output(self, index: int) -> Any:
        return self.passing(list(OUTPUTS.values())[index % len(OUTPUTS)])

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.seen.append(outputs)

    on_test_batch_end = on_validation_batch_end

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.zeros(len(OUTPUTS), 16, dtype=torch.long), batch_size=1)  # type: ignore[arg-type]

    test_dataloader = predict_dataloader = val_dataloader


class Passing(nn.Module):
    """A submodule with a parameter that returns what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Any) -> Any:
        return value


def test_evaluation_steps_and_submodules_return_anything(tmp_path: Path) -> None:
    """Lightning's loops and callbacks see the very outputs, before a fit, within it and after it."""

    def scenario(make: Any, root: Path) -> Any:
        module = Returning()
        trainer = make(max_steps=1, num_sanity_val_steps=0, val_check_interval=1, limit_train_batches=1)
        trainer.validate(module, verbose=False)
        trainer.fit(module)
        trainer.test(module, verbose=False)
        predicted = trainer.predict(module)
        assert len(module.seen) == 3 * len(OUTPUTS)
        return [[repr(output) for output in outputs] for outputs in (module.seen, predicted)]

    seen, predicted = assert_like_plain_lightning(scenario, tmp_path)
    assert seen == [repr(output) for output in OUTPUTS.values()] * 3
    assert predicted == [repr(output) for output in OUTPUTS.values()]


def test_a_training_step_that_returns_a_float(tmp_path: Path) -> None:
    """Lightning's own error says what to return, as with other strategies."""

    def scenario(make: Any, root: Path) -> str:
        module = Everything()
        module.training_step = lambda batch, batch_idx: 0.5  # type: ignore[method-assign]
        with pytest.raises(MisconfigurationException, match="must return a Tensor") as caught:
            make().fit(module)
        return str(caught.value)

    assert_like_plain_lightning(scenario, tmp_path)
