"""The parts of a step: its checks, the gradients' norm over all ranks, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray

from lightning_smartinfinity.errors import CudaError, SmartInfinityError
from lightning_smartinfinity.pipeline.parameters.cuda import link_to
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.gradient_path import UsedGradients
from lightning_smartinfinity.zero3.optimizer.parameter_groups import find_changed
from lightning_smartinfinity.zero3.optimizer.persistence import Persistence
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation, gradients_given_up
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.ranks.collectives import sums_over_ranks
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.validation import find_ignored
from lightning_smartinfinity.zero3.untyped import ParamGroup, ZeroOptimizer, ZeroParameter

__all__ = ["StorageStep", "clip_factor"]


class StorageStep:
    """Checks, measures and takes the steps of one rank.

    Args:
        optimizer: DeepSpeed's optimizer, built.
        rank_state: The rank's open state.
        update: The update of the step in flight.
        speculation: The speculative update.
        used_gradients: Gradients that a step has used up.
        persistence: Writes state in memory to storage.
        offload: The settings.
        groups: The parameter groups of the user's optimizer as the training begins.
    """

    def __init__(
        self,
        optimizer: ZeroOptimizer,
        rank_state: RankState,
        update: UpdateInFlight,
        speculation: Speculation,
        used_gradients: UsedGradients,
        persistence: Persistence,
        *,
        offload: OffloadSettings,
        groups: Sequence[ParamGroup],
    ) -> None:
        self._optimizer = optimizer
        self._rank_state, self._update, self._speculation = rank_state, update, speculation
        self._used_gradients, self._persistence = used_gradients, persistence
        self._by_cuda = offload.cards is None
        self._has_budget = offload.gradient_budget is not None
        self._given = [list(group["params"]) for group in groups]
        self._frozen: list[ZeroParameter] = [
            param for group in self._given for param in group if not param.requires_grad
        ]
        self._link = link_to(torch.device(get_accelerator().current_device_name()))

    def refusal(self) -> SmartInfinityError | None:
        """Return why this rank does not take the step; None if it does. The other ranks do not know of it."""
        activations = self._rank_state.activations
        return (
            self._rank_state.background.take_failure()
            or self.failure_of_gradients()
            or (None if activations is None else activations.take_failure())
            or find_changed(self._optimizer.optimizer.param_groups, self._given)
            or find_ignored(list(self._rank_state.partition.params()), self._frozen, names=self._optimizer.param_names)
        )

    def failure_of_gradients(self) -> SmartInfinityError | None:
        """Return why gradients of this window are missing; None if all are there."""
        arena = self._rank_state.arena
        failure = arena.take_failure()
        if failure is not None or not arena.is_lost:
            return failure
        used = self._speculation.used_again
        if used is not None:
            return gradients_given_up(f"parameter {self._optimizer.param_names[used]!r} was used or changed")
        return gradients_given_up("parameters or state were read or changed, or the step before failed,")

    def squares(self, refused: SmartInfinityError | None) -> tuple[float, SmartInfinityError | None]:
        """Return this rank's sum of squares, and why the rank does not take the step. Other ranks do not know of it.

        Args:
            refused: Result of :meth:`refusal`. If it is an error, or the sum fails, the sum is NaN.
        """
        arena, squares = self._rank_state.arena, math.nan
        try:
            self._used_gradients.add_zeros_to(arena)
            if refused is None:
                squares = arena.sum_of_squares()
        except CudaError as error:
            refused = refused or error
        refused = refused or self.failure_of_gradients()  # the sum may have read gradients from storage
        return (squares if refused is None else math.nan), refused

    def norm(self, squares: float) -> float:
        """Return the norm of the scaled gradients of all ranks; NaN if that of any rank is not finite. Collective.

        Args:
            squares: This rank's sum of squares.
        """
        # Each rank enters this sum only after it has committed the previous step. So the sum is also the barrier that
        # keeps extents of a new generation from being written before all ranks have committed the previous one.
        # The same collective carries whether state in memory is to be written to storage, and whether the ranks can
        # resume from their training records.
        faults, group = self._rank_state.record_faults(), self._rank_state.partition.group
        told = [squares, float(self._persistence.announce()), *map(float, faults)]
        total, announced, *num_faults = sums_over_ranks(told, group)
        self._persistence.hear(announced=announced > 0)
        self._rank_state.agree_on_records(*num_faults, group=group)
        return math.sqrt(total) if total >= 0 else math.nan

    def plan(self, *, active: NDArray[np.bool_], loss_scale: float, clip_factor: float = 1.0) -> StepPlan:
        """Return the plan of an update.

        Args:
            active: bool[num_parameters]: which parameters it updates.
            loss_scale: The scale of the loss that the gradients come from.
            clip_factor: What to divide the gradients by, besides the scale.
        """
        arena = self._rank_state.arena
        return StepPlan(
            active=active,
            gradients=arena.flats(),
            window=arena.of_step if self._has_budget else None,
            outputs=self._rank_state.partition.outputs(by_cuda=self._by_cuda),
            groups=self._optimizer.optimizer.param_groups,
            gradient_scale=1.0 / (loss_scale * clip_factor),
            compressed=self._rank_state.compressed,
            loss_scale=loss_scale,
            arrived=arena.arrived,
            link=self._link,
            first_uses=self._update.first_uses(),
        )

    def take(self, *, loss_scale: float, clip_factor: float, drains: bool) -> None:
        """Begin the update from the arena, and end the window.

        Args:
            loss_scale: The scale of the loss that the gradients come from.
            clip_factor: What to divide the gradients by, besides the scale.
            drains: Whether to wait for the update and commit it.
        """
        arena, held = self._rank_state.arena, self._rank_state.held_signals
        plan = self.plan(active=arena.active.copy(), loss_scale=loss_scale, clip_factor=clip_factor)
        self._rank_state.keeping.saved = False
        if self._rank_state.handler.writes_back:
            held.hold()
        try:
            self._update.begin(plan)
            if drains:
                self._update.drain()
        except BaseException as error:  # interrupts, too
            held.drop()
            self._update.roll_back(error)
            raise
        self._update.step_returns()
        self._used_gradients.use(arena)
        arena.reset()
        if not self._rank_state.is_recorded:
            held.release()


def clip_factor(norm: float, limit: float) -> float:
    """Return what to divide gradients of a norm by, so that their norm is at most ``limit`` (0: no limit)."""
    # DeepSpeed adds 1e-6, too: clipped gradients have to get the same bits.
    return max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0
