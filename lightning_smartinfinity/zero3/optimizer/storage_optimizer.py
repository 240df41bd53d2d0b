"""DeepSpeed's stage-3 optimizer with its state on storage.

DeepSpeed's class does the rest of ZeRO-3: gathers, hooks, buckets, reduce-scatter, loss scale. This class overrides
the methods that touch optimizer state, takes the step, and calls components for the rest: ``open_state.py`` opens the
storage, :class:`GradientPath` takes reduced gradients, :class:`UpdateInFlight` and :class:`Speculation` run the update,
:class:`StateByParameter` gives access to single parameters. The tests of docs/seams.md check every override against
the installed DeepSpeed.
"""

from __future__ import annotations

import math
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD
from lightning_smartinfinity.common.freed_memory import return_freed_memory
from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError
from lightning_smartinfinity.pipeline.rules import UpdateRule, rule_for
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath, RetainedGraphs, UsedGradients
from lightning_smartinfinity.zero3.optimizer.hyperparameters import values_of
from lightning_smartinfinity.zero3.optimizer.open_state import open_state
from lightning_smartinfinity.zero3.optimizer.outside_writes import OutsideWrites
from lightning_smartinfinity.zero3.optimizer.overlap_choice import OverlapChoice
from lightning_smartinfinity.zero3.optimizer.parameter_groups import restore_groups
from lightning_smartinfinity.zero3.optimizer.persistence import Persistence
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState, warn_of_rolled_back_step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.optimizer.state_by_parameter import StateByParameter
from lightning_smartinfinity.zero3.optimizer.storage_step import StorageStep, clip_factor
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import has_step_hooks, with_step_hooks
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.gather_methods import bring_in_writes
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers
from lightning_smartinfinity.zero3.parameters.partition import Partition
from lightning_smartinfinity.zero3.ranks.collectives import (
    raise_together,
    sum_over_ranks,
)
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.environment import reuse_freed_memory
from lightning_smartinfinity.zero3.untyped import ParamGroup, SavedState, ZeroParameter

__all__ = ["StorageOptimizer"]


class StorageOptimizer(DeepSpeedZeroOptimizer_Stage3):
    """A ZeRO-3 optimizer that holds no optimizer state: it streams tasklets through a transfer handler.

    Args:
        *args: Arguments, as ``DeepSpeedEngine`` passes them.
        offload: Where optimizer state is stored and how it is transferred.
        groups: All parameter groups of the user's optimizer, empty ones included.
        describe: Function that returns this optimizer's state for a checkpoint.
        load: Function that loads such a state into this optimizer.
        **kwargs: Further arguments, as ``DeepSpeedEngine`` passes them.

    Attributes:
        rank_state: The rank's open state.
        partition: This rank's slices of the parameters.
        rule: The update rule of the user's optimizer.
        groups_left: Numbers of the user's parameter groups that DeepSpeed uses: those with parameters.
        first_values: Initial values of the arrays other than the master.
        save_id: Id of the checkpoint last saved or loaded; all files of one save contain it.
        saves_weights_only: Whether the checkpoint being saved omits the moments.
        step_follows: Whether the caller announced that the next backward is the last of its window.
        may_bind: Whether only the step follows that backward: no clipping, and no user code that could read or change
            gradients or hyperparameters.
        is_clipped: Whether the gradients of the next step are already clipped, so that the step does not clip them.
        gradients: The way of reduced gradients into the arena.
        used_gradients: Gradients that a step has used up, and torch would still hold.
        retained: Keeps parameters gathered while autograd will use a graph again.
        overlap: The overlap of every step.
        update: The update of the step in flight.
        persistence: Writes state in host memory to storage.
        speculation: The speculative update, which begins within backward.
        outside_writes: Updates the masters after parameters are written outside of steps.
        storage_step: The parts of a step.
        by_parameter: Access to single parameters' masters, optimizer state and gradients.
        idle: Object that closes the storage when it is garbage-collected, once the training is over.
    """

    partition: Partition
    rule: UpdateRule
    first_values: Sequence[float]

    def __init__(
        self,
        *args: object,
        offload: OffloadSettings,
        groups: Sequence[ParamGroup],
        describe: Callable[[Any], SavedState],
        load: Callable[..., None],
        **kwargs: object,
    ) -> None:
        self._offload, self._groups = offload, groups
        # What the script gives the optimizer, or gave it when the training began that is resumed.
        self.configured = values_of(groups)
        self._describe, self._load = describe, load
        self._has_warned_of_skip = False
        self.save_id: str | None = None
        self.saves_weights_only = False
        self.idle: object = None
        self.step_follows = self.may_bind = self.is_clipped = False
        self.rank_state = RankState(keep=offload.transfer.keep, flush_timeout=offload.transfer.flush_timeout)
        self.gradients = GradientPath(self, self.rank_state)
        try:
            super().__init__(*args, **kwargs)
        except BaseException:
            self.rank_state.close()
            raise
        self.retained = RetainedGraphs(self.parameter_offload)
        # Measure steps only after the activations to offload have been chosen.
        is_chosen = offload.activations is not None and offload.activations.keep == "auto"
        unmeasured = FIRST_SETTLED_FORWARD if is_chosen else 0
        self.overlap = OverlapChoice(offload.overlap, obstacle=self._obstacle_to_speculation(), unmeasured=unmeasured)
        overlaps = self.overlap.mode != "none"
        self.persistence = Persistence(
            self.rank_state,
            interval=offload.transfer.interval if offload.transfer.is_resumable else None,
            group=self.dp_process_group,
        )
        self.speculation = Speculation(self.rank_state)
        self.update = UpdateInFlight(
            self.rank_state,
            self.speculation,
            release_gathered=self._partition_all_parameters,
            overlaps=overlaps,
            persistence=self.persistence,
        )
        self.gradients.open(self.update, self.speculation)
        self.outside_writes = OutsideWrites(self.rank_state, self.update)
        self.outside_writes.watch(self.module.parameters())
        self.update.watch(self.module.parameters(), self.parameter_offload.get_param_coordinator())
        self.used_gradients = UsedGradients(len(self.partition.layout.parameters))
        self.storage_step = StorageStep(
            self,
            self.rank_state,
            self.update,
            self.speculation,
            self.used_gradients,
            self.persistence,
            offload=self._offload,
            groups=self._groups,
        )
        self.by_parameter = StateByParameter(
            self, self.rank_state, self.update, self.speculation, self.gradients, self.used_gradients
        )
        if overlaps:
            self._watch_releases()
            # At the end of a step the base class gathers the small parameters of the whole model. As the update may
            # still run then, they are gathered when first used instead, and stay gathered until the next step.
            self.persistent_parameters: list[ZeroParameter] = []
        return_freed_memory()
        reuse_freed_memory()

    @property
    def own_hyperparameters(self) -> bool:
        """Whether a resumed training has the script's hyperparameters, not those that were saved."""
        return self._offload.own_hyperparameters

    @property
    def storage_folder(self) -> Path:
        """The first folder of the training's storage."""
        return self._offload.storage[0]

    def _obstacle_to_speculation(self) -> str | None:
        if self._offload.transfer.places_per_tasklet == 1:
            return "with TransferConfig(durability='none') a wrong speculative update could not be rolled back"
        if not self.partition.outputs(by_cuda=self._offload.cards is None).allows_incremental:
            return "parameters that the update device cannot reach are not updated within backward"
        return None

    # ---- construction: methods that the base class calls from its constructor

    def _setup_for_real_optimizer(self) -> None:
        return_freed_memory()  # of partitions that the base class has merged by copying
        self._create_fp32_partitions()
        self._create_buckets()
        self.grad_partitions_flat_buffer = None
        self.rule = rule_for(self.optimizer)
        self.first_values = self.rule.first_values(self.optimizer.defaults)
        self._offload = open_state(
            self,
            self.rank_state,
            self._offload,
            self.rule,
            first_values=self.first_values,
            await_gradients=lambda parameters: self.update.await_gradients(parameters),
        )
        self.partition = self.rank_state.partition

    def _create_fp32_partitions(self) -> None:
        # Empty placeholders: the base class and DeepSpeed's tools index this list, but the state is on storage.
        for _ in self.fp16_groups:
            self.fp32_partitioned_groups_flat.append(torch.empty(0, dtype=torch.float32))
        self.groups_left = restore_groups(self, self._groups)
        self.optimizer.state.clear()  # Adagrad's constructor creates full arrays there

    def _create_buckets(self) -> None:
        self.gradients.create_buckets()

    # ---- the step

    @torch.no_grad()
    def step(self, closure: Callable[[], object] | None = None) -> None:
        """Update this rank's partition from the arena, or skip the update if a gradient on any rank is not finite.

        Unless ``overlap`` is ``"none"``, the update may still be in progress on return. The next call that drains the
        update, at the latest the next step, then raises the storage errors below.

        Raises:
            UnsupportedError: A closure was passed, or on some rank a parameter was unfrozen or has a gradient that the
                step would ignore.
            StorageError, DeviceError, CudaError: Reading, checking, updating or writing state failed on some rank, and
                all ranks rolled the step back. The parameters have their values from before the step. If these could
                not be read back, saving raises, too.
            CheckpointError: A checkpoint that was being saved in the background could not be written on some rank.
        """
        if closure is not None:
            raise UnsupportedError(
                "optimizer.step(closure) does not work with the smart_infinity strategy.",
                "Run forward and backward first, then call step().",
            )
        self.used_gradients.warn_of_missing_reset()
        limit, self.is_clipped = 0.0 if self.is_clipped else self.clip_grad, False
        self.overlap.step_begins(time.monotonic(), sum_over_ranks=self._sum_over_ranks)
        refused = self.storage_step.refusal()
        self._pre_step()
        self.retained.release()
        self._partition_all_parameters()
        if not self.speculation.on:
            self.update.drain()
        self.rank_state.complete_record()  # on all ranks, before they enter the sum over gradients
        # The scale that backward used; below, the loss scaler may change it for the next window.
        loss_scale = float(self.loss_scale)
        squares, refused = self.storage_step.squares(refused)
        norm = self.storage_step.norm(squares)
        if not math.isfinite(norm):
            self.speculation.discard()
            raise_together(refused, self.dp_process_group)
        self.overflow = not math.isfinite(norm)
        if self._loss_scale_update_and_overflow_cleanup():
            self._warn_of_skipped_step()
            # Gather the small parameters that DeepSpeed keeps gathered, as at the end of a step that is taken.
            self.checkpoint_event_epilogue()
            return
        self._global_grad_norm = norm / loss_scale
        factor, drains = clip_factor(self._global_grad_norm, limit), self.overlap.mode == "none"
        take = partial(self.storage_step.take, loss_scale=loss_scale, clip_factor=factor, drains=drains)
        with_step_hooks(self.optimizer, take)
        # torch's schedulers warn unless their optimizer has stepped; its own step() never runs here.
        self.optimizer._opt_called = True
        self._post_step(set())

    def _warn_of_skipped_step(self) -> None:
        # In fp16, steps are regularly skipped while the loss scale adapts.
        if self.dtype is not torch.float16 and not self._has_warned_of_skip:
            self._has_warned_of_skip = True
            warnings.warn(
                "A step was skipped: a gradient is NaN or infinite. Further skipped steps are not reported.",
                stacklevel=2,
            )

    def _partition_all_parameters(self) -> None:
        """Call the base class; if an interrupt broke off a gather, end all gathers in flight and call it again."""
        try:
            super()._partition_all_parameters()
        except (AssertionError, RuntimeError):  # raised for a parameter whose gather was interrupted
            end_gathers(self.parameter_offload.module)
            super()._partition_all_parameters()

    def _sum_over_ranks(self, value: float) -> float:
        return sum_over_ranks(value, self.dp_process_group)

    # ---- gradients

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Mark the engine's backward."""
        self.gradients.in_backward = True
        try:
            yield
        finally:
            self.gradients.in_backward = False

    def reduce_ready_partitions_and_remove_grads(self, param: ZeroParameter) -> None:
        """Call the base class, except for a parameter that already waits in a bucket; refuse sparse gradients."""
        if self.gradients.is_new(param):
            super().reduce_ready_partitions_and_remove_grads(param)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: ZeroParameter) -> None:
        """Call the base class, unless buckets are bypassed: then the gradient goes into the arena at once."""
        is_complete = getattr(param, "ds_grad_is_ready", True)
        if not self.gradients.bypasses_buckets:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            if is_complete:
                self.gradients.waiting[param.ds_id] = param
        elif is_complete:
            self.gradients.take(param)

    def partition_grads(
        self, params_to_release: Sequence[ZeroParameter], grad_partitions: Sequence[torch.Tensor]
    ) -> None:
        """Write or add reduced gradient slices to the arena, and release the full gradients."""
        self.gradients.arrive(params_to_release, grad_partitions)

    def backward_begins(self, *, retain_graph: bool) -> None:
        """Prepare for the engine's backward: begin a speculative update if a step is announced to follow it."""
        if not self.rank_state.in_fit:  # else a record follows at the end of the batch
            self.rank_state.held_signals.release()
        self.retained.backward_begins(retain_graph=retain_graph)
        self.update.drain_for_residual()
        follows, self.step_follows = self.step_follows, False
        # A speculative update starts from the masters, which lack pending writes to gathered parameters.
        if (
            self.overlap.backward_begins(step_follows=follows)
            and not retain_graph
            and bring_in_writes(self.partition.params())
        ):
            everything = np.ones(len(self.partition.layout.parameters), np.bool_)
            plan = self.storage_step.plan(active=everything, loss_scale=float(self.loss_scale))
            may_bind = self.may_bind and not has_step_hooks(self.optimizer)
            self.update.begin_speculatively(plan, binds=may_bind and plan.window is not None)
        else:
            self.speculation.discard()
        is_last = follows or not self.overlap.is_announced
        self.rank_state.arena.backward_begins(binds=self.speculation.binds, is_last=is_last)

    def backward_epilogue(self) -> None:
        """Call the base class, which releases leftover parameters; begin the tasklets that this makes ready."""
        self.gradients.end_backward()
        self.retained.backward_ended()
        super().backward_epilogue()
        self.speculation.begin_ready()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard this window's gradients, including those in the arena, and the speculative update."""
        self.speculation.discard()
        self.gradients.drop()
        with replaced(self, "fp16_groups", []):  # saves the base class's loop over all parameters
            super().zero_grad(set_to_none)

    def zero_grad_as_torch(self, set_to_none: bool) -> None:
        """Call :meth:`zero_grad`; unless ``set_to_none``, parameters that had a gradient count as having a zero one.

        Users call this method; DeepSpeed's engine calls :meth:`zero_grad` on its own.
        """
        self.used_gradients.reset_all(self.rank_state.arena, to_none=set_to_none)
        self.zero_grad(set_to_none)

    def _watch_releases(self) -> None:
        offload = self.parameter_offload
        release = offload.post_sub_module_backward_function

        def releasing(sub_module: torch.nn.Module) -> None:
            release(sub_module)
            self.speculation.begin_ready()

        offload.post_sub_module_backward_function = releasing

    # ---- single parameters: DeepSpeed's safe_get_* and safe_set_*

    def _get_fp32_opt_state_partition(
        self, param: ZeroParameter, release_swap_buffers: bool, optim_state_key: str | None = None
    ) -> tuple[torch.Tensor, int]:
        return self.by_parameter.state_slice(param, optim_state_key)

    def _get_fp32_grad_state_partition(
        self, param: ZeroParameter, release_swap_buffers: bool
    ) -> tuple[torch.Tensor, int]:
        return self.by_parameter.gradient_slice(param)

    def set_full_hp_param(self, value: torch.Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """See :meth:`StateByParameter.set_state`."""
        self.by_parameter.set_state(param, value, optim_state_key)

    def set_local_hp_param(self, value: torch.Tensor, param: ZeroParameter, optim_state_key: str | None = None) -> None:
        """See :meth:`StateByParameter.set_state`; ``value`` is this rank's slice."""
        self.by_parameter.set_state(param, value, optim_state_key, is_slice=True)

    def get_fp32_grad_for_param(self, param: ZeroParameter) -> torch.Tensor | None:
        """See :meth:`StateByParameter.full_gradient`."""
        return self.by_parameter.full_gradient(param)

    def get_local_fp32_grad_for_param(self, param: ZeroParameter) -> torch.Tensor | None:
        """See :meth:`StateByParameter.local_gradient`."""
        return self.by_parameter.local_gradient(param)

    def set_fp32_grad_for_param(self, value: torch.Tensor, param: ZeroParameter) -> None:
        """See :meth:`StateByParameter.set_gradient`."""
        self.by_parameter.set_gradient(param, value)

    def set_local_grad_for_param(self, value: torch.Tensor, param: ZeroParameter) -> None:
        """See :meth:`StateByParameter.set_gradient`; ``value`` is this rank's slice."""
        self.by_parameter.set_gradient(param, value, is_slice=True)

    def update_fp32_grad_for_param_vectorized(
        self, update_func: Callable[[torch.Tensor, ZeroParameter], torch.Tensor], param_list: Sequence[ZeroParameter]
    ) -> None:
        """Replace full gradients by ``update_func(gradient, param)``; skip parameters without one."""
        for param in param_list:
            gradient = self.get_fp32_grad_for_param(param)
            if gradient is not None:
                self.set_fp32_grad_for_param(update_func(gradient, param), param)

    # ---- checkpoints

    def checkpoint_event_prologue(self) -> None:
        """Call the base class and drain the step in flight: a checkpoint is about to be saved or loaded."""
        super().checkpoint_event_prologue()
        self.update.drain()

    def _rigid_state_dict(self) -> SavedState:
        return self._describe(self)

    def _rigid_load_state_dict(self, state_dict: SavedState, load_optimizer_states: bool = True) -> None:
        self._load(self, state_dict, load_optimizer_states=load_optimizer_states)

    @torch.no_grad()
    def _restore_from_bit16_weights(self) -> None:
        """Set the masters to the partition's current values; moments and step counts stay."""
        self.update.drain()
        self.outside_writes.refresh_all()

    # ---- the end of the training

    def close_storage(self, *, since: str = "") -> None:
        """Drain the step in flight together with all ranks, and close the training's storage. Collective.

        While an error is handled, or after one has ended the training, ranks do not agree, because only this rank may
        have failed. Each then commits what it can; a kept store continues from the newest generation that all have.

        Args:
            since: Half a sentence giving the reason, for the errors of later uses.
        """
        if dist.is_initialized() and sys.exc_info()[0] is None and not self.update.is_in_doubt:
            self.settle()
        self.rank_state.close(since=since)

    def settle(self) -> None:
        """Drain the step in flight together with all ranks; a failure is a warning. Collective."""
        try:
            self.update.drain()
        except SmartInfinityError as error:
            warn_of_rolled_back_step(error)

    def destroy(self) -> None:
        """Call the base class with an empty state, because it would search the state for pinned memory."""
        with replaced(self.optimizer, "state_on_storage", {}):
            super().destroy()

    def create_reduce_and_remove_grad_hooks(self) -> None:
        """Call the base class so that its hooks do not keep this object: the garbage collector does not see them."""
        self._gradient_hooks: list[Callable[..., object]] = []

        def register(original: Callable[..., object], param: ZeroParameter, hook: Callable[..., object]) -> object:
            self._gradient_hooks.append(hook)
            return original(param, _calling(weakref.ref(hook)))

        with wrapped(stage3, "register_grad_hook", register):
            super().create_reduce_and_remove_grad_hooks()

    # ---- refused

    def offload_states(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no optimizer state in memory to move."""
        raise UnsupportedError(
            "offload_states does not work with the smart_infinity strategy.",
            "Remove the call: optimizer state is on storage already.",
        )

    def reload_states(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no offloaded state to move back."""
        raise UnsupportedError(
            "reload_states does not work with the smart_infinity strategy.",
            "Remove the call: optimizer state stays on storage.",
        )


def _calling(reference: Callable[[], Callable[..., object] | None]) -> Callable[..., object]:
    """Return a function that calls another one while that exists."""

    def call(*args: object) -> object:
        function = reference()
        return None if function is None else function(*args)

    return call
