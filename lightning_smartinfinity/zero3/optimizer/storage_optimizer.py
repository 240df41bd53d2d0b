"""DeepSpeed's stage-3 optimizer with its state on storage: set-up and step.

DeepSpeed's class does the rest of ZeRO-3: gathers, hooks, buckets, reduce-scatter, loss scale. Our subclasses replace
everything that touches optimizer state: ``gradient_path.py`` stores reduced gradients, this file takes the step,
``state_by_parameter.py`` gives access to single parameters, ``engine/optimizer.py`` handles checkpoints. The tests of
docs/seams.md check every override against the installed DeepSpeed.
"""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from numpy.typing import NDArray

from lightning_smartinfinity.activations import FIRST_SETTLED_FORWARD
from lightning_smartinfinity.common.freed_memory import return_freed_memory
from lightning_smartinfinity.errors import ConfigError, SmartInfinityError, UnsupportedError
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.pipeline.gradients.compressed_gradients import CompressedGradients
from lightning_smartinfinity.pipeline.gradients.gradient_memory import GradientWindows
from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout, build_layout
from lightning_smartinfinity.pipeline.parameters.cuda import CudaLink, link_to
from lightning_smartinfinity.pipeline.parameters.partitions import ParameterMemory
from lightning_smartinfinity.pipeline.rules import UpdateRule, rule_for
from lightning_smartinfinity.pipeline.step_plan import StepPlan
from lightning_smartinfinity.zero3.optimizer.gradient_path import GradientPath
from lightning_smartinfinity.zero3.optimizer.outside_writes import OutsideWrites
from lightning_smartinfinity.zero3.optimizer.overlap_choice import OverlapChoice
from lightning_smartinfinity.zero3.optimizer.parameter_groups import find_changed, restore_groups
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState, warn_of_rolled_back_step
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation, gradients_given_up
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import has_step_hooks, with_step_hooks
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.broken_gathers import end_gathers
from lightning_smartinfinity.zero3.parameters.gather_methods import bring_in_writes
from lightning_smartinfinity.zero3.parameters.partition import Partition, describe_partition
from lightning_smartinfinity.zero3.ranks.collectives import (
    raise_together,
    raising_together,
    sum_over_ranks,
    sums_over_ranks,
)
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.activations import open_activations
from lightning_smartinfinity.zero3.setup.environment import reuse_freed_memory
from lightning_smartinfinity.zero3.setup.open_storage import (
    gradient_store,
    open_storage,
    with_cache,
    with_gradient_budget,
)
from lightning_smartinfinity.zero3.setup.validation import find_ignored
from lightning_smartinfinity.zero3.untyped import ParamGroup, ZeroParameter

__all__ = ["StorageOptimizer"]

_log = logging.getLogger(__name__)


class StorageOptimizer(GradientPath):
    """A ZeRO-3 optimizer that holds no optimizer state: it streams tasklets through a transfer handler.

    Args:
        *args: Arguments, as ``DeepSpeedEngine`` passes them.
        offload: Where optimizer state is stored and how it is transferred.
        groups: All parameter groups of the user's optimizer, empty ones included.
        **kwargs: Further arguments, as ``DeepSpeedEngine`` passes them.

    Attributes:
        rule: The update rule of the user's optimizer.
        groups_left: Numbers of the user's parameter groups that DeepSpeed uses: those with parameters.
        first_values: Initial values of the arrays other than the master.
        save_id: Id of the checkpoint last saved or loaded; all files of one save contain it.
        saves_weights_only: Whether the checkpoint being saved omits the moments.
        step_follows: Whether the caller announced that the next backward is the last of its window.
        may_bind: Whether only the step follows that backward: no clipping, and no user code that could read or change
            gradients or hyperparameters.
        is_clipped: Whether the gradients of the next step are already clipped, so that the step does not clip them.
        update: The update of the step in flight.
        speculation: The speculative update, which begins within backward.
        outside_writes: Updates the masters after parameters are written outside of steps.
        expects_zero_grad: Whether the caller's loop resets gradients, as it does for training in memory.
        idle: Object that closes the storage when it is garbage-collected, once the training is over.
    """

    rule: UpdateRule
    first_values: Sequence[float]

    def __init__(self, *args: object, offload: OffloadSettings, groups: Sequence[ParamGroup], **kwargs: object) -> None:
        self._offload, self._groups = offload, groups
        self._warned_of_skip = self._warned_of_reset = False
        self.expects_zero_grad = False
        self.save_id: str | None = None
        self.saves_weights_only = False
        self.idle: object = None
        self._frozen: list[ZeroParameter] = []
        self.step_follows = self.may_bind = self.is_clipped = False
        rank_state = RankState(keep=offload.transfer.keep)
        try:
            super().__init__(*args, rank_state=rank_state, **kwargs)
        except BaseException:
            rank_state.close()
            raise
        # Measure steps only after the activations to offload have been chosen.
        is_chosen = offload.activations is not None and offload.activations.keep == "auto"
        unmeasured = FIRST_SETTLED_FORWARD if is_chosen else 0
        obstacle = self._obstacle_to_speculation()
        self.overlap = OverlapChoice(offload.overlap, obstacle=obstacle, unmeasured=unmeasured)
        self.speculation = Speculation(rank_state)
        self.update = UpdateInFlight(rank_state, self.speculation, release_gathered=self._partition_all_parameters)
        self.outside_writes = OutsideWrites(rank_state, self.update)
        self.outside_writes.watch(self.module.parameters())
        self.update.watch(self.module.parameters(), self.parameter_offload.get_param_coordinator())
        if not offload.resumes:
            self.outside_writes.bring_in(self.partition.params())
        self._watch_releases()
        # Each bool[num_parameters]: whether torch would hold a gradient, whether it would hold it as zeros, and whether
        # a step has used the gradient and nothing has reset it since.
        self._had_gradient, self._zeros, self._used = np.zeros((3, len(self.partition.layout.parameters)), np.bool_)
        self._kept_gathered: list[ZeroParameter] = self.persistent_parameters
        self._choose_kept_gathered()
        return_freed_memory()
        reuse_freed_memory()

    @property
    def storage_folder(self) -> Path:
        """The first folder of the training's storage."""
        return self._offload.storage[0]

    def _obstacle_to_speculation(self) -> str | None:
        if self._offload.transfer.places_per_tasklet == 1:
            return "with TransferConfig(durability='none') a wrong speculative update could not be rolled back"
        if not self._outputs().allows_incremental:
            return "parameters that the update device cannot reach are not updated within backward"
        return None

    # ---- construction: methods that the base class calls from its constructor

    def _setup_for_real_optimizer(self) -> None:
        return_freed_memory()  # of partitions that the base class has merged by copying
        self._create_fp32_partitions()
        self._create_buckets()
        self.grad_partitions_flat_buffer = None
        self.rule = rule = rule_for(self.optimizer)
        self.first_values = rule.first_values(self.optimizer.defaults)
        transfer = self._offload.transfer
        layout = build_layout(
            describe_partition(self),
            tasklet_bytes=self._offload.tasklet_bytes,
            num_arrays=len(rule.arrays),
            num_devices=len(self._offload.storage),
            places_per_tasklet=transfer.places_per_tasklet,
            state_format=self._offload.state_format,
        )
        layout = with_cache(layout, self._offload, self.dp_process_group)
        partition = Partition(self, layout)
        partition.zero_padding()
        self.rank_state.hold_partition(partition)
        self._offload = with_gradient_budget(
            self._offload, layout, itemsize=self.gradient_accumulation_dtype.itemsize, group=self.dp_process_group
        )
        handler = open_storage(
            self._offload,
            layout,
            rule,
            dtype=self.dtype,
            gradient_dtype=self.gradient_accumulation_dtype,
            groups=self.optimizer.param_groups,
            masters=self._outputs(),
            first_values=self.first_values,
            group=self.dp_process_group,
        )
        self.rank_state.hold_handler(handler)
        self._link = link = link_to(torch.device(get_accelerator().current_device_name()))
        with raising_together(self.dp_process_group):
            memory = self._gradient_memory(layout)
            self.rank_state.activations = open_activations(self._offload, self.dp_process_group)
        dtype = self.gradient_accumulation_dtype
        self.rank_state.hold_arena(GradientArena(layout, dtype=dtype, link=link, memory=memory))
        self.rank_state.compressed = self._compressed(layout, link)
        if self._offload.resumes:
            self.rank_state.keeping.resumable = True
            self._read_parameters()

    def _gradient_memory(self, layout: PartitionLayout) -> GradientWindows | None:
        """Return gradient memory with a budget; None if all gradients may be in memory."""
        budget = self._offload.gradient_budget
        if budget is None:
            return None
        if self._offload.transfer.gradient_bytes == "auto":
            nbytes = layout.numel * self.gradient_accumulation_dtype.itemsize
            _log.info("gradient_bytes='auto': %d of %d bytes of gradients are held in memory.", budget, nbytes)
        return GradientWindows(
            layout,
            self.gradient_accumulation_dtype,
            budget_bytes=budget,
            store=gradient_store(self._offload, direct=self.rank_state.handler.has_direct_io),
            await_use=lambda tasklet: self.update.await_gradients(layout.parameters_in([tasklet]).tolist()),
        )

    def _read_parameters(self) -> None:
        """Set all parameters to their masters on storage. Collective."""
        with raising_together(self.dp_process_group):
            self.rank_state.handler.state.scan(
                lambda window: self.partition.write(window.begin, torch.from_numpy(window.arrays[0]))
            )

    def _compressed(self, layout: PartitionLayout, link: CudaLink | None) -> CompressedGradients | None:
        codec = self._offload.compression
        if codec is None:
            return None
        device = torch.device(get_accelerator().current_device_name())
        return CompressedGradients(
            layout,
            codec,
            gradients=self.arena.buffer,
            num_threads=self._offload.feed_back_threads,
            device=device if device.type == "cuda" else None,
            link=link,
        )

    def _outputs(self) -> ParameterMemory:
        return self.partition.outputs(by_cuda=self._offload.cards is None)

    def _create_fp32_partitions(self) -> None:
        # Empty placeholders: the base class and DeepSpeed's tools index this list, but the state is on storage.
        for _ in self.fp16_groups:
            self.fp32_partitioned_groups_flat.append(torch.empty(0, dtype=torch.float32))
        self.groups_left = restore_groups(self, self._groups)
        self._given = [list(group["params"]) for group in self._groups]
        self._frozen += [param for group in self._given for param in group if not param.requires_grad]
        self.optimizer.state.clear()  # Adagrad's constructor creates full arrays there

    def _create_buckets(self) -> None:
        if self.bypasses_buckets:
            return
        device, numel = get_accelerator().current_device_name(), self.reduce_bucket_size
        with raising_together(self.dp_process_group):
            try:
                for dtype, bucket in self.ipg_buckets.items():
                    bucket.buffer = torch.empty(numel, dtype=dtype, device=device)
            except RuntimeError as error:  # torch raises it when out of memory
                raise ConfigError(
                    f"zero={{'reduce_bucket_size': {numel}}}: there is no memory for a bucket on {device}.",
                    "Lower it: as many elements as the largest parameter has are enough.",
                ) from error

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
        self._warn_of_gradients_left()
        limit, self.is_clipped = 0.0 if self.is_clipped else self.clip_grad, False
        self.overlap.step_begins(time.monotonic(), sum_over_ranks=self._sum_over_ranks)
        self._choose_kept_gathered()
        refused = (
            self.rank_state.background.take_failure()
            or self._failure_of_gradients()
            or self._failure_of_activations()
            or find_changed(self.optimizer.param_groups, self._given)
            or find_ignored(list(self.partition.params()), self._frozen, names=self.param_names)
        )
        self._pre_step()
        self.retained.release()
        self._partition_all_parameters()
        if not self.speculation.on:
            self.update.drain()
        self.rank_state.complete_record()  # on all ranks, before they enter the sum over gradients
        # The scale that backward used; below, the loss scaler may change it for the next window.
        loss_scale = float(self.loss_scale)
        for index in np.flatnonzero(self._zeros & ~self.arena.active).tolist():
            self.arena.replace(index, torch.empty(0))
        squares = math.nan if refused is not None else self.arena.sum_of_squares()
        refused = refused or self._failure_of_gradients()  # the sum may have read gradients from storage
        norm = self._scaled_gradient_norm(math.nan if refused is not None else squares)
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
        clip_factor = _clip_factor(self._global_grad_norm, limit)
        with_step_hooks(self.optimizer, partial(self._update, loss_scale=loss_scale, clip_factor=clip_factor))
        # torch's schedulers warn unless their optimizer has stepped; its own step() never runs here.
        self.optimizer._opt_called = True
        self._post_step(set())

    def _warn_of_gradients_left(self) -> None:
        if self.expects_zero_grad and not self._warned_of_reset and self._used.any():
            self._warned_of_reset = True
            warnings.warn(
                "A step came without zero_grad() since the step before. In memory it would use the gradients of that "
                "step, too; with the smart_infinity strategy a step uses its gradients up, and each begins with none. "
                "Call optimizer.zero_grad() after each step. To add gradients up, call step() after the last backward.",
                stacklevel=2,
            )

    def _failure_of_gradients(self) -> SmartInfinityError | None:
        failure = self.arena.take_failure()
        if failure is not None or not self.arena.is_lost:
            return failure
        used = self.speculation.used_again
        if used is not None:
            return gradients_given_up(f"parameter {self.param_names[used]!r} was used or changed")
        return gradients_given_up("parameters or state were read or changed, or the step before failed,")

    def _failure_of_activations(self) -> SmartInfinityError | None:
        activations = self.rank_state.activations
        return None if activations is None else activations.take_failure()

    def _choose_kept_gathered(self) -> None:
        # At the end of a step the base class gathers the small parameters of the whole model. If the update may still
        # run then, they are gathered when first used instead, and stay gathered until the next step.
        self.persistent_parameters = self._kept_gathered if self.overlap.mode == "none" else []

    def _warn_of_skipped_step(self) -> None:
        # In fp16, steps are regularly skipped while the loss scale adapts.
        if self.dtype is not torch.float16 and not self._warned_of_skip:
            self._warned_of_skip = True
            warnings.warn(
                "A step was skipped: a gradient is NaN or infinite. Further skipped steps are not reported.",
                stacklevel=2,
            )

    def _scaled_gradient_norm(self, squares: float) -> float:
        """Return the norm over all ranks, given this rank's sum of squares; NaN if that of any rank is not finite."""
        # Each rank enters this sum only after it has committed the previous step. So the sum is also the barrier that
        # keeps extents of a new generation from being written before all ranks have committed the previous one.
        # The same collective carries whether the ranks can resume from their training records.
        faults = self.rank_state.record_faults()
        total, *num_faults = sums_over_ranks([squares, *map(float, faults)], self.dp_process_group)
        self.rank_state.agree_on_records(*num_faults, group=self.dp_process_group)
        return math.sqrt(total) if total >= 0 else math.nan

    def _plan(self, *, active: NDArray[np.bool_], loss_scale: float, clip_factor: float = 1.0) -> StepPlan:
        return StepPlan(
            active=active,
            gradients=self.arena.flats(),
            window=None if self._offload.gradient_budget is None else self.arena.of_step,
            outputs=self._outputs(),
            groups=self.optimizer.param_groups,
            gradient_scale=1.0 / (loss_scale * clip_factor),
            compressed=self.rank_state.compressed,
            loss_scale=loss_scale,
            link=self._link,
            first_uses=self.update.first_uses(),
        )

    def _update(self, *, loss_scale: float, clip_factor: float) -> None:
        plan = self._plan(active=self.arena.active.copy(), loss_scale=loss_scale, clip_factor=clip_factor)
        self.rank_state.keeping.saved = False
        try:
            self.update.begin(plan)
            if self.overlap.mode == "none":
                self.update.drain()
        except BaseException as error:  # interrupts, too
            self.update.roll_back(error)
            raise
        self.update.step_returns()
        self._had_gradient |= self.arena.active
        self._used |= self.arena.active
        self.arena.reset()

    def _partition_all_parameters(self) -> None:
        """Call the base class; if an interrupt broke off a gather, end all gathers in flight and call it again."""
        try:
            super()._partition_all_parameters()
        except (AssertionError, RuntimeError):  # raised for a parameter whose gather was interrupted
            end_gathers(self.parameter_offload.module)
            super()._partition_all_parameters()

    def _sum_over_ranks(self, value: float) -> float:
        return sum_over_ranks(value, self.dp_process_group)

    def partition_grads(
        self, params_to_release: Sequence[ZeroParameter], grad_partitions: Sequence[torch.Tensor]
    ) -> None:
        """Call the base class after the step in flight has used the gradients that these replace."""
        if not self._in_backward:
            self._drain_for_residual()
        self.update.require(params_to_release)
        super().partition_grads(params_to_release, grad_partitions)
        self.speculation.arrived(params_to_release)

    def backward_begins(self, *, retain_graph: bool) -> None:
        """Prepare for the engine's backward: begin a speculative update if a step is announced to follow it."""
        self._drain_for_residual()
        follows, self.step_follows = self.step_follows, False
        # A speculative update starts from the masters, which lack pending writes to gathered parameters.
        if (
            self.overlap.backward_begins(step_follows=follows)
            and not retain_graph
            and bring_in_writes(self.partition.params())
        ):
            everything = np.ones(len(self.partition.layout.parameters), np.bool_)
            plan = self._plan(active=everything, loss_scale=float(self.loss_scale))
            may_bind = self.may_bind and not has_step_hooks(self.optimizer)
            self.update.begin_speculatively(plan, binds=may_bind and plan.window is not None)
        else:
            self.speculation.discard()
        self.arena.backward_begins(binds=self.speculation.binds)

    def _drain_for_residual(self) -> None:
        # The residual is computed from the gradients of the step in flight, which the next ones are about to replace.
        if self.rank_state.residual is not None:
            self.update.drain()

    def backward_epilogue(self) -> None:
        """Call the base class, which releases leftover parameters; begin the tasklets that this makes ready."""
        super().backward_epilogue()
        self.speculation.begin_ready()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Call the base class after discarding the speculative update."""
        self.speculation.discard()
        super().zero_grad(set_to_none)

    def zero_grad_as_torch(self, set_to_none: bool) -> None:
        """Call :meth:`zero_grad`; unless ``set_to_none``, parameters that had a gradient count as having a zero one.

        Users call this method; DeepSpeed's engine calls :meth:`zero_grad` on its own.
        """
        had = self._had_gradient | self.arena.active
        self._had_gradient = had & (not set_to_none)
        self._zeros = self._had_gradient.copy()
        self._used[:] = False
        self.zero_grad(set_to_none)

    def _watch_releases(self) -> None:
        offload = self.parameter_offload
        release = offload.post_sub_module_backward_function

        def releasing(sub_module: torch.nn.Module) -> None:
            release(sub_module)
            self.speculation.begin_ready()

        offload.post_sub_module_backward_function = releasing

    # ---- the end of the training

    def close_storage(self, *, since: str = "") -> None:
        """Drain the step in flight together with all ranks, and close the training's storage. Collective.

        While an error is handled, or after one has ended the training, ranks do not agree, because only this rank may
        have failed. Each then commits what it can; a kept store continues from the newest generation that all have.

        Args:
            since: Half a sentence giving the reason, for the errors of later uses.
        """
        if dist.is_initialized() and sys.exc_info()[0] is None and not self.update.is_in_doubt:
            try:
                self.update.drain()
            except SmartInfinityError as error:
                warn_of_rolled_back_step(error)
        self.rank_state.close(since=since)


def _clip_factor(norm: float, limit: float) -> float:
    return max(1.0, (norm + 1e-6) / limit) if limit > 0 else 1.0
