"""Trains on several ranks, each of which returns what it found, for :func:`tests.training.worker.each_rank`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_smartinfinity import SmartInfinityError, SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.integrations.trainer import strategy as trainer_strategy
from lightning_smartinfinity.planning import choice, needs
from lightning_smartinfinity.planning.needs import PROCESS_BYTES
from tests.helpers import native_testing as testing
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT
from tests.training.actions import does
from tests.training.test_bad_input import fit, free_bytes
from tests.training.test_gradient_budget import BUDGET, PLAIN, run_of
from tests.training.test_offloaded_parameters import Configured
from tests.training.test_overlap import NVME, SMALL_RING

RANK = int(os.environ.get("RANK", "0"))

# ---- bad input on one rank

# This is more than the state of one rank and less than the state of both.
ROOM_FOR_ONE_BYTES = 2 * 1024 * 1024


def on_rank_1(patch: Any) -> Any:
    """Return the patch on rank 1, and one that changes nothing on rank 0."""
    return patch if RANK == 1 else contextlib.nullcontext()


CASES: dict[str, Any] = {
    "file-in-the-way": contextlib.nullcontext(),
    "locked": contextlib.nullcontext(),
    "no-space-on-one": on_rank_1(free_bytes(8192)),
    "no-space-for-both": free_bytes(ROOM_FOR_ONE_BYTES),
    "full-at-allocation": on_rank_1(
        mock.patch.object(os, "posix_fallocate", side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    ),
    "unsupported-optimizer": contextlib.nullcontext(),
    "nothing-wrong": contextlib.nullcontext(),
}


def bad_input(root: Path) -> dict[str, Any]:
    """Fit each case once and return the errors. The test prepares the obstacles."""
    found: dict[str, Any] = {}
    for case, patch in CASES.items():
        module = LitTiny(Recipe(width=64))
        if case == "unsupported-optimizer":
            module.configure_optimizers = lambda module=module: torch.optim.NAdam(module.parameters())  # type: ignore[method-assign, misc]
        strategy = SmartInfinityStrategy(root / case / "storage", timeout=timedelta(seconds=LIMIT))
        try:
            with patch:
                fit(module, strategy, root / case, devices=2)
            found[case] = {"error": None, "losses": module.losses}
        except SmartInfinityError as error:
            found[case] = {"error": type(error).__name__, "message": str(error), "remedy": error.remedy}
        finally:
            strategy.close()
    return found


# ---- parameters on storage


def failing_read(root: Path) -> dict[str, Any]:
    """Make a read of parameters fail on rank 1; return the error and the files that this rank leaves on storage."""

    def arm(trainer: Any, module: Any) -> None:
        if trainer.global_step == 1:
            trainer.strategy.drain()  # updated parameters are on their way to storage
            if RANK == 1:
                testing.inject(trainer.strategy._parameters.store.core, fail_read_at=2)

    strategy, met = SmartInfinityStrategy(root / "storage", zero=NVME, transfer={"keep": False}), "nothing"
    trainer = quiet_trainer(root, strategy, devices=2, callbacks=[does(on_train_batch_start=arm)])
    try:
        trainer.fit(LitTiny(Recipe(precision="bf16-mixed", width=64)))
    except SmartInfinityError as error:
        met = f"{type(error).__name__}: {error}"
    strategy.close()
    # In contrast to Path.rglob(), this may meet folders that the other rank removes.
    folders = [Path(folder) for folder, _, _ in os.walk(root) if folder.endswith(f"{RANK:05d}")]
    return {"met": met, "left": [str(path) for folder in folders for path in folder.glob("*.bin")]}


def parameter_budget(root: Path, budget: str) -> dict[str, Any]:
    """Return the losses, the largest number of bytes of parameters in memory, and warnings; 0 is no budget."""
    recipe = Recipe(precision="bf16-mixed", width=64, depth=3, tied=False, max_steps=4)
    zero: dict[str, Any] | None = {"offload_param": {"device": "nvme"}} if int(budget) else None
    transfer: dict[str, Any] = {"keep": False, **({"parameter_bytes": int(budget)} if zero else {})}
    strategy = SmartInfinityStrategy(root / "storage", zero=zero, transfer=transfer)
    trainer = quiet_trainer(root, strategy, devices=2, max_steps=recipe.max_steps, precision=recipe.precision)
    module, most, fetch = LitTiny(recipe), [0], PartitionedParameterCoordinator.fetch_sub_module

    def counting(coordinator: Any, sub_module: Any, forward: bool) -> None:
        fetch(coordinator, sub_module, forward)
        gathered = [p for p in module.parameters() if p.ds_status is not ZeroParamStatus.NOT_AVAILABLE]  # type: ignore[attr-defined]
        partitions = strategy._parameters._memory.nbytes if strategy._parameters is not None else 0
        most[0] = max(most[0], partitions + sum(p.ds_numel_aligned * p.dtype.itemsize for p in gathered))

    PartitionedParameterCoordinator.fetch_sub_module = counting
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(module)
    strategy.close()
    said = [str(warning.message) for warning in seen if "in use at once" in str(warning.message)]
    return {"losses": module.losses, "most": most[0], "warnings": said}


# ---- plans


def planned(root: Path) -> dict[str, Any]:
    """Train with a plan and without, where ranks see different memory; return losses, settings and what was told."""
    choice.BUDGETS = (256 << 10, 64 << 10)
    needs._TRANSFER_BYTES = 16 << 10  # else as much as all parameters of a tiny model
    told: list[str] = []
    trainer_strategy.rank_zero_info = lambda message: told.append(message) if RANK == 0 else None
    recipe = Recipe(precision="bf16-true", width=64, depth=6, max_steps=3)
    memory = 2 * PROCESS_BYTES + (1_500_000 if RANK else 10**9)
    seen: dict[str, Any] = {}
    for name, plan in (("expected", None), ("losses", {"host_memory": memory})):
        strategy = SmartInfinityStrategy(root / name, plan=plan, transfer=SMALL_RING, overlap="none")
        module = Configured(recipe)
        quiet_trainer(root, strategy, devices=2, max_steps=3, precision=recipe.precision).fit(module)
        seen[name] = module.losses
        seen["settings"] = [str(strategy._settings.zero), str(strategy._settings.transfer)]
        strategy.close()
    return {**seen, "told": [message for message in told if "Plan for Configured" in message]}


# ---- a weight that one step uses once more than those before


class Segment(nn.Module):
    """A block whose forward is run again in backward, after other blocks if there are some."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.others: list[nn.Module] = []  # a list, since they are part of the model already

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self._run, x, use_reentrant=True)

    def _run(self, x: torch.Tensor) -> Any:
        for other in self.others:
            x = other(x)
        return self.block(x)


class Again(LitTiny):
    """A module whose first segment runs the last block, too, in the fifth step.

    The blocks are checkpointed segments, whose gradients arrive as each is recomputed. Those of the last block have
    arrived, and have been given up, long before the first segment's.
    """

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.model.blocks = nn.ModuleList(Segment(block) for block in self.model.blocks)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        first, *_, last = self.model.blocks
        first.others = [last.block] if self.trainer.global_step == 4 else []  # type: ignore[assignment, list-item]


def used_again(root: Path, devices: str) -> dict[str, Any]:
    """Return the error, and which masters differ from those of a training without overlap that ends before it."""
    recipe, error, masters = dataclasses.replace(PLAIN, depth=4), "", []
    for overlap, budget, max_steps in (("none", None, 4), ("backward", 2 * BUDGET, 6)):
        run = run_of(root / overlap, recipe, overlap, budget=budget)
        strategy = SmartInfinityStrategy(root / overlap / "storage", transfer=run.transfer, **run.options)
        module, settings = Again(recipe), {"devices": int(devices), "max_steps": max_steps}
        try:
            quiet_trainer(root, strategy, precision=recipe.precision, **settings).fit(module)
        except UnsupportedError as failure:
            error = str(failure)
        optimizer: Any = strategy.optimizers[0]
        binding, generation = optimizer.speculation.num_binding, optimizer.update.drained_handler().generation
        masters.append([optimizer.get_full_hp_param(param).clone() for param in module.parameters()])
        strategy.close()
    differ = [index for index, pair in enumerate(zip(*masters, strict=True)) if not torch.equal(*pair)]
    return {"error": error, "binding": binding, "generation": generation, "differ": differ}
