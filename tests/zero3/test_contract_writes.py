"""The private seams through which parameters are written from outside of steps."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from lightning.pytorch.strategies import DeepSpeedStrategy

from lightning_smartinfinity.strategy import SmartInfinityStrategy
from lightning_smartinfinity.zero3.optimizer import SmartInfinityOptimizer
from lightning_smartinfinity.zero3.outside_writes import _Watched

OVERRIDDEN = [
    "set_full_hp_param",
    "set_local_hp_param",
    "get_fp32_grad_for_param",
    "get_local_fp32_grad_for_param",
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
]


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_overridden_methods_take_what_deepspeed_passes(name: str) -> None:
    """Every method of the API by parameter has the parameters of the one it replaces."""
    theirs = inspect.signature(getattr(DeepSpeedZeroOptimizer_Stage3, name))
    assert list(theirs.parameters) == list(inspect.signature(getattr(SmartInfinityOptimizer, name)).parameters)


def test_every_writer_of_state_is_overridden() -> None:
    """What fetches a partition to write through it (release_swap_buffers=False) is replaced here."""
    writers = {
        name
        for name, member in inspect.getmembers(DeepSpeedZeroOptimizer_Stage3, inspect.isfunction)
        if "release_swap_buffers=False" in inspect.getsource(member)
    }
    assert writers and writers <= set(OVERRIDDEN)


def test_the_watched_partition_method_takes_what_the_original_takes() -> None:
    """zero.Init installs ``partition`` on each parameter; ours has the same parameters and defaults."""
    source = inspect.getsource(partition_parameters.Init._convert_to_deepspeed_param)
    (line,) = (line.strip() for line in source.splitlines() if line.strip().startswith("def partition("))
    ours = inspect.signature(_Watched.__call__)
    written = ", ".join(f"{name}={parameter.default}" for name, parameter in ours.parameters.items() if name != "self")
    assert line == f"def partition({written}):"
    assert "param.partition = partition" in source


def test_lightning_restores_full_weights_by_the_overridden_hook() -> None:
    """load_full_weights ends in _restore_zero_state with the checkpoint that load_checkpoint returned."""
    for name in ("load_checkpoint", "_restore_zero_state"):
        theirs: Any = getattr(DeepSpeedStrategy, name)
        ours: Any = getattr(SmartInfinityStrategy, name)
        assert list(inspect.signature(theirs).parameters) == list(inspect.signature(ours).parameters)
    assert "self._restore_zero_state(checkpoint, strict=strict)" in inspect.getsource(
        DeepSpeedStrategy.load_model_state_dict
    )
