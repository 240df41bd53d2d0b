"""Updates beside the next forward or within backward: whatever reads the state or fails meanwhile, no bit changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import torch

from tests.fabric import worker as fabric_worker
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.training import actions
from tests.training.actions import does
from tests.training.worker import Run, train

# A tasklet holds about two layers, and the ring holds only a few tasklets.
SMALL_RING = {"tasklet_bytes": 64 * 1024, "num_buffers": 2}
BF16 = Recipe(precision="bf16-mixed", depth=1, max_steps=4)
NVME = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0}

CASES: dict[str, tuple[Recipe, dict[str, Any]]] = {
    # The parameters are the masters. The recipe has groups and unused, frozen and odd parameters.
    "32-true": (
        Recipe(groups=True, depth=1, skip_side_at=(1,), frozen=True, odd=True, scheduler="step", max_steps=4),
        {},
    ),
    # Windows of two micro-batches and of one, clipping, a step skipped for a NaN, and validation. The masters are
    # stored as the parameters and a remainder.
    "bf16-mixed": (
        dataclasses.replace(
            BF16, accumulate=2, epoch_batches=3, clip=0.3, nan_at=(2,), validate=True, groups=True, max_steps=5
        ),
        {"state_format": "int8_remainder"},
    ),
    # The loss scale makes the first steps overflow and be skipped.
    "16-mixed": (dataclasses.replace(BF16, precision="16-mixed"), {"initial_scale_power": 22, "hysteresis": 1}),
    "nvme": (dataclasses.replace(BF16, tied=False), {"zero": NVME}),
    "cpu": (dataclasses.replace(BF16, precision="32-true"), {"zero": {"offload_param": {"device": "cpu"}}}),
}


def result(
    run: Run, *callbacks: pl.Callback, look: Callable[[Any], object] | None = None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Train and return losses, validation, recorded figures and masters.

    Args:
        run: What to train.
        *callbacks: Callbacks of the Trainer.
        look: Is called with the strategy before it is closed.
    """
    module, trainer, recorder = train(run, *callbacks)
    if look is not None:
        look(trainer.strategy)
    trainer.strategy.close()  # type: ignore[attr-defined]
    return (module.losses, module.validated, recorder.extra), recorder.masters


def assert_same(ours: tuple[Any, dict[str, torch.Tensor]], theirs: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert repr(ours[0]) == repr(theirs[0])  # as text, NaNs are equal
    assert ours[1].keys() == theirs[1].keys()
    for name, master in theirs[1].items():
        assert torch.equal(ours[1][name], master), name


ACCESSES: list[actions.Action] = [
    actions.read_state,
    actions.write_state,
    actions.write_gathered,
    actions.refresh_masters,
    actions.save,
    actions.drain,
]


def test_what_reads_or_writes_from_outside_finishes_the_update(tmp_path: Path) -> None:
    """After each access nothing is in flight, and training continues with the same losses."""
    seen: list[tuple[str, bool, bool]] = []

    def access(trainer: pl.Trainer, module: Any) -> None:
        handler, action = trainer.strategy.optimizers[0].rank_state.handler, ACCESSES[trainer.global_step - 1]
        before = handler.in_flight
        read = action(trainer, module)
        seen.append((action.__name__, before, handler.in_flight))
        module.losses.append(read)  # type: ignore[arg-type]

    recipe = dataclasses.replace(BF16, precision="32-true", max_steps=len(ACCESSES))
    ours, theirs = (
        result(Run(str(tmp_path / overlap), recipe, options={"overlap": overlap}), does(on_train_batch_end=access))
        for overlap in ("forward", "none")
    )
    assert_same(ours, theirs)
    assert seen == [(action.__name__, busy, False) for busy in (True, False) for action in ACCESSES]


def assert_holds(trainer: pl.Trainer, module: LitTiny, masters: dict[str, torch.Tensor]) -> None:
    """Assert that the masters have these values, and the parameters the rounded ones."""
    for name, param in module.model.named_parameters():
        assert torch.equal(trainer.strategy.optimizers[0].get_full_hp_param(param), masters[name]), name
        with deepspeed.zero.GatheredParameters([param]):
            assert torch.equal(param, masters[name].to(param.dtype)), name


def test_closing_commits_the_step_in_flight(tmp_path: Path) -> None:
    """Closing after the last step of a Fabric loop leaves the parameters of that step in memory."""
    recipe = dataclasses.replace(BF16, precision="32-true", tied=False)
    values: list[list[torch.Tensor]] = []
    for overlap in ("none", "forward"):
        fabric = fabric_worker.quiet_fabric(tmp_path / overlap, options={"overlap": overlap}, precision="32-true")
        module = recipe.build_model()
        model, optimizer = fabric.setup(module, recipe.build_optimizer(list(module.named_parameters())))
        inner = optimizer.engine.optimizer
        testing.inject(inner.update.drained_handler()._device._pipeline, max_delay_us=20_000)
        fabric_worker._window(fabric, model, recipe, 0)
        optimizer.step()
        handler = inner.rank_state.handler
        assert handler.in_flight == (overlap == "forward")
        fabric.strategy.close()
        assert handler.generation == 1 and not handler.in_flight
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            values.append([param.detach().clone() for param in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*values, strict=True))
