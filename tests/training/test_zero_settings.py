"""DeepSpeed's own ZeRO-3 settings change how training runs, but never its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.models import Recipe
from tests.training.worker import Recorder, Run, train

RECIPE = Recipe(groups=True, clip=0.3, accumulate=2, skip_side_at=(1,), max_steps=3)
SETTINGS: list[Any] = [
    {"offload_param": {"device": "cpu"}},
    {"overlap_comm": True},
    pytest.param({"contiguous_gradients": False}, marks=pytest.mark.long),
    {"sub_group_size": 3000},
    pytest.param({"stage3_param_persistence_threshold": 0}, marks=pytest.mark.long),
]


def _train(out: Path, **options: Any) -> tuple[list[float], Recorder]:
    module, trainer, recorder = train(Run(out=str(out), recipe=RECIPE, options=options))
    trainer.strategy.close()  # type: ignore[attr-defined]
    return module.losses, recorder


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Recorder]:
    """Train with the strategy's own settings and return losses and masters."""
    return _train(tmp_path_factory.mktemp("default"))


@pytest.mark.parametrize("zero", SETTINGS, ids=lambda zero: next(iter(zero)))
def test_a_setting_trains_like_the_default(
    zero: dict[str, Any], default: tuple[list[float], Recorder], tmp_path: Path
) -> None:
    """Losses, masters and step counts equal the default's, except for the order in which the norm is summed."""
    losses, recorder = _train(tmp_path, zero=zero)
    expected_losses, expected = default
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), atol=1e-6, rtol=0)
    assert recorder.masters.keys() == expected.masters.keys()
    for name, master in expected.masters.items():
        torch.testing.assert_close(recorder.masters[name], master, atol=1e-6, rtol=0, msg=name)
    assert sorted(recorder.extra["steps"]) == sorted(expected.extra["steps"])
