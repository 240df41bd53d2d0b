"""The path of a gradient from ZeRO-3's hooks into the arena, and graphs that autograd uses again.

ZeRO-3 gathers a module's parameters when backward enters the module, and releases them when it leaves. A second pass
through the graph (``retain_graph``), or a pass through the graph that the first one made (``create_graph``), would
find them empty, so they stay gathered.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from lightning_smartinfinity.errors import ConfigError, UnsupportedError
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.optimizer.speculation import Speculation
from lightning_smartinfinity.zero3.optimizer.update_in_flight import UpdateInFlight
from lightning_smartinfinity.zero3.parameters.gradients import GET_GRAD, SET_GRAD
from lightning_smartinfinity.zero3.ranks.collectives import raising_together
from lightning_smartinfinity.zero3.untyped import ZeroOffload, ZeroOptimizer, ZeroParameter

__all__ = [
    "GradientPath",
    "RetainedGraphs",
    "UsedGradients",
]


class RetainedGraphs:
    """Keeps parameters gathered from the first backward that retains its graph to the end of the first that does not.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose module hooks gather and release.
    """

    def __init__(self, offload: ZeroOffload) -> None:
        self._offload = offload
        self._any_retained = False
        self._is_last_use = True
        self._in_engine = False
        offload.pre_sub_module_backward_function = self._noticing(offload.pre_sub_module_backward_function)
        self._release_leftovers = offload.release_backward_leftovers
        for name in (
            "post_sub_module_backward_function",
            "post_sub_module_forward_function",
            "release_backward_leftovers",
        ):
            setattr(offload, name, self._unless_retained(getattr(offload, name)))

    def backward_begins(self, *, retain_graph: bool) -> None:
        """Record that the engine's backward begins."""
        self._any_retained = self._any_retained or retain_graph
        self._is_last_use = not retain_graph
        self._in_engine = True

    def backward_ended(self) -> None:
        """Release the kept parameters after the engine's or the user's backward, unless its graph is retained."""
        self._in_engine = False
        if self._is_last_use:
            self.release()

    def release(self) -> None:
        """Release the parameters that were kept gathered."""
        if self._any_retained:
            self._any_retained = False
            self._offload.partition_all_parameters()
            self._release_leftovers()

    def _noticing(self, gather: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def noticing(sub_module: torch.nn.Module) -> None:
            is_retained = _graph_is_retained()
            self._any_retained = self._any_retained or is_retained
            if not self._in_engine:
                # DeepSpeed treats torch.autograd.grad on the engine's output as a backward, and ends it.
                self._is_last_use = not is_retained
            gather(sub_module)

        return noticing

    def _unless_retained(self, release: Callable[..., None]) -> Callable[..., None]:
        def releasing(*sub_module: torch.nn.Module) -> None:
            if not self._any_retained:
                release(*sub_module)

        return releasing


def _graph_is_retained() -> bool:
    """Return whether the current backward pass retains its graph; autograd reports it only within the pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


class GradientPath:
    """The way of a rank's reduced gradients from ZeRO-3's hooks into the :class:`GradientArena`.

    Args:
        optimizer: DeepSpeed's optimizer, which need not be built yet.
        rank_state: The rank's open state.

    Attributes:
        waiting: Parameters, by ds_id, whose gradient waits in a bucket. If buckets are bypassed, only gradients from
            outside the engine's backward wait, in ``param.grad``.
        in_backward: Whether the engine's backward is in progress: a step that directly follows another backward refuses
            its gradients.
    """

    def __init__(self, optimizer: ZeroOptimizer, rank_state: RankState) -> None:
        self._optimizer, self._rank_state = optimizer, rank_state
        self.waiting: dict[int, ZeroParameter] = {}
        self.in_backward = False

    def open(self, update: UpdateInFlight, speculation: Speculation) -> None:
        """Begin to take gradients, now that DeepSpeed's optimizer is built.

        Args:
            update: The update of the step in flight, which may still use gradients that new ones replace.
            speculation: The speculative update, which gradients make ready.
        """
        self._update, self._speculation = update, speculation
        self._index = self._rank_state.partition.index
        self._order_after_bucket_copies()

    @cached_property
    def bypasses_buckets(self) -> bool:
        """Whether gradients enter the arena one by one: nothing is reduced, and no copies to a device are batched.

        Buckets of another dtype are not bypassed, because they round gradients.
        """
        return (
            dist.get_world_size(self._optimizer.dp_process_group) == 1
            and torch.device(get_accelerator().current_device_name()).type == "cpu"
            and self._optimizer.ipg_buckets.keys() == {self._optimizer.dtype}
        )

    def create_buckets(self) -> None:
        """Create the memory of DeepSpeed's buckets, unless they are bypassed.

        Raises:
            ConfigError: There is no memory for one on some rank.
        """
        if self.bypasses_buckets:
            return
        device, numel = get_accelerator().current_device_name(), self._optimizer.reduce_bucket_size
        with raising_together(self._optimizer.dp_process_group):
            try:
                for dtype, bucket in self._optimizer.ipg_buckets.items():
                    bucket.buffer = torch.empty(numel, dtype=dtype, device=device)
            except RuntimeError as error:  # torch raises it when out of memory
                raise ConfigError(
                    f"zero={{'reduce_bucket_size': {numel}}}: there is no memory for a bucket on {device}.",
                    "Lower it: as many elements as the largest parameter has are enough.",
                ) from error

    def is_new(self, param: ZeroParameter) -> bool:
        """Return whether no gradient of the parameter waits in a bucket.

        Under reentrant checkpointing, a shared weight's gradient arrives once per segment. As its ``grad`` is a view of
        the bucket, autograd has already added the later gradients to the first.

        Raises:
            UnsupportedError: The gradient is sparse.
        """
        gradient = GET_GRAD(param)
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"Parameter {self._optimizer.param_names[param]!r} received a sparse gradient, which ZeRO-3 cannot "
                "partition.",
                "Build the module with sparse=False.",
            )
        if param.ds_id not in self.waiting:
            return True
        if not get_accelerator().resolves_data_dependency():
            # Autograd has added to the bucket on its own stream, and the reduction reads the bucket on another one.
            self._optimizer.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())
        return False

    def take(self, param: ZeroParameter) -> None:
        """Take a parameter's gradient without a bucket: into the arena at once, within the engine's backward."""
        if self.in_backward:
            self.arrive([param], [GET_GRAD(param)])
        else:
            self.waiting[param.ds_id] = param

    def arrive(self, params: Sequence[ZeroParameter], gradients: Sequence[torch.Tensor]) -> None:
        """Write or add reduced gradient slices to the arena, and release the full gradients.

        The first slice of a window replaces earlier values, once the step in flight has used these. The arena keeps
        track of it, because DeepSpeed's micro_step_id is wrong under reentrant checkpointing.
        """
        if not self.in_backward:
            self._update.drain_for_residual()
        if not self._update.is_idle:
            self._update.require(params)
        gradients = list(map(self._outside_buckets, gradients))
        self._rank_state.arena.arrive_all([self._index[param.ds_id] for param in params], gradients)
        with torch._C.DisableTorchFunctionSubclass():
            for param in params:
                _drop_gradient(param)
                self.waiting.pop(param.ds_id, None)
        if self._speculation.on:
            self._speculation.arrived(params)

    def _outside_buckets(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient on a device outside DeepSpeed's buckets, which later gradients overwrite.

        A bucket with one parameter is reduced in place. The arena copies gradients of a device later.
        """
        if not gradient.is_cuda:
            return gradient
        where = gradient.untyped_storage().data_ptr()
        buckets = (bucket.buffer.untyped_storage().data_ptr() for bucket in self._optimizer.ipg_buckets.values())
        return gradient.clone() if where in buckets else gradient

    def end_backward(self) -> None:
        """Take the gradients that wait outside buckets."""
        if self.bypasses_buckets and self.waiting:
            waiting = list(self.waiting.values())
            self.arrive(waiting, [GET_GRAD(param) for param in waiting])

    def drop(self) -> None:
        """Discard this window's gradients, in parameters, buckets and arena."""
        # Not by the base class: it would record a stream on them, which a CPU does not have.
        with torch._C.DisableTorchFunctionSubclass():  # for speed, as above
            for param in self._rank_state.partition.params():
                _drop_gradient(param)
        self._rank_state.arena.reset()
        if self._rank_state.activations is not None:
            self._rank_state.activations.gradients_are_gone()
        # An interrupted backward may have left gradients in the buckets.
        for bucket in self._optimizer.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        self.waiting.clear()

    def _order_after_bucket_copies(self) -> None:
        # With overlap_comm, gradients are copied into the bucket on a separate stream. Autograd may add to such a
        # gradient later, on its own stream: it must wait for the copy.
        accelerator, stream = get_accelerator(), self._optimizer.reduce_and_partition_stream
        if accelerator.resolves_data_dependency() or stream == accelerator.default_stream():
            return

        def ordered(param: ZeroParameter) -> Callable[[torch.Tensor], None]:
            def wait(gradient: torch.Tensor) -> None:
                if param.ds_id in self.waiting:
                    accelerator.current_stream().wait_stream(stream)

            return wait

        for param in self._rank_state.partition.params():
            self._optimizer._grad_acc_hooks.append(param.register_hook(ordered(param)))


def _drop_gradient(param: ZeroParameter) -> None:
    gradient = GET_GRAD(param)
    if gradient is not None:
        if not get_accelerator().is_synchronized_device():
            gradient.record_stream(get_accelerator().current_stream())
        SET_GRAD(param, None)


class UsedGradients:
    """Which parameters torch would still hold a gradient of, although the arena holds none.

    Args:
        num_parameters: Number of parameters in the partition.

    Attributes:
        expects_reset: Whether the caller's loop resets gradients, as it does for training in memory.
    """

    def __init__(self, num_parameters: int) -> None:
        # Each bool[num_parameters]: whether torch would hold a gradient, whether it would hold it as zeros, and whether
        # a step has used the gradient and nothing has reset it since.
        self._held, self._zeros, self._used = np.zeros((3, num_parameters), np.bool_)
        self.expects_reset = False
        self._has_warned = False

    def warn_of_missing_reset(self) -> None:
        """Warn once if a step comes before the gradients of the step before were reset."""
        if self.expects_reset and not self._has_warned and self._used.any():
            self._has_warned = True
            warnings.warn(
                "A step came without zero_grad() since the step before. In memory it would use the gradients of that "
                "step, too; with the smart_infinity strategy a step uses its gradients up, and each begins with none. "
                "Call optimizer.zero_grad() after each step. To add gradients up, call step() after the last backward.",
                stacklevel=3,
            )

    def add_zeros_to(self, arena: GradientArena) -> None:
        """Make parameters active whose gradient torch would hold as zeros, since no other gradient has arrived."""
        for index in np.flatnonzero(self._zeros & ~arena.active).tolist():
            arena.replace(index, torch.empty(0))

    def use(self, arena: GradientArena) -> None:
        """Record that a step uses the arena's gradients up."""
        self._held |= arena.active
        self._used |= arena.active

    def reset_all(self, arena: GradientArena, *, to_none: bool) -> None:
        """Record that user code resets all gradients.

        Args:
            arena: The gradients of this window, about to be discarded.
            to_none: Whether torch would hold none afterwards; if not, it would hold zeros where it held a gradient.
        """
        self._held = (self._held | arena.active) & (not to_none)
        self._zeros = self._held.copy()
        self._used[:] = False

    def reset(self, index: int) -> None:
        """Record that user code has read or discarded one used gradient, as ``Module.zero_grad`` does."""
        self._used[index] = False

    def holds(self, index: int) -> bool:
        """Return whether torch would hold a gradient of a parameter."""
        return bool(self._held[index])
