"""The path of a gradient from ZeRO-3's hooks into the arena, and graphs that autograd uses again.

ZeRO-3 gathers a module's parameters when backward enters the module, and releases them when it leaves. A second pass
through the graph (``retain_graph``), or a pass through the graph that the first one made (``create_graph``), would
find them empty, so they stay gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.pipeline.gradients.arena import GradientArena
from lightning_smartinfinity.zero3.optimizer.rank_state import RankState
from lightning_smartinfinity.zero3.parameters.gradients import GET_GRAD, SET_GRAD
from lightning_smartinfinity.zero3.parameters.partition import Partition
from lightning_smartinfinity.zero3.untyped import ZeroOffload, ZeroParameter

__all__ = [
    "GradientPath",
    "RetainedGraphs",
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


class GradientPath(DeepSpeedZeroOptimizer_Stage3):
    """A ZeRO-3 optimizer whose reduced gradients go into a :class:`GradientArena`.

    Args:
        rank_state: The rank's open state.
        *args: Arguments, as ``DeepSpeedEngine`` passes them.
        **kwargs: Further arguments, as ``DeepSpeedEngine`` passes them.

    Attributes:
        retained: Keeps parameters gathered while autograd will use a graph again.
    """

    def __init__(self, *args: object, rank_state: RankState, **kwargs: object) -> None:
        self.rank_state = rank_state
        # Parameters, by ds_id, whose gradient waits in a bucket. If buckets are bypassed, only gradients from outside
        # the engine's backward wait, in ``param.grad``.
        self._waiting: dict[int, ZeroParameter] = {}
        self._in_backward = False
        super().__init__(*args, **kwargs)
        self.retained = RetainedGraphs(self.parameter_offload)
        self._order_after_bucket_copies()

    @cached_property
    def bypasses_buckets(self) -> bool:
        """Whether gradients enter the arena one by one: nothing is reduced, and no copies to a device are batched.

        Buckets of another dtype are not bypassed, because they round gradients.
        """
        return (
            dist.get_world_size(self.dp_process_group) == 1
            and torch.device(get_accelerator().current_device_name()).type == "cpu"
            and self.ipg_buckets.keys() == {self.dtype}
        )

    @property
    def partition(self) -> Partition:
        """This rank's slices of the parameters."""
        return self.rank_state.partition

    @property
    def arena(self) -> GradientArena:
        """The gradient arena."""
        return self.rank_state.arena

    def reduce_ready_partitions_and_remove_grads(self, param: ZeroParameter) -> None:
        """Call the base class, except for a parameter that already waits in a bucket; refuse sparse gradients.

        Under reentrant checkpointing, a shared weight's gradient arrives once per segment. As its ``grad`` is a view of
        the bucket, autograd has already added the later gradients to the first.
        """
        gradient = GET_GRAD(param)
        if gradient is not None and gradient.layout is not torch.strided:
            raise UnsupportedError(
                f"Parameter {self.param_names[param]!r} received a sparse gradient, which ZeRO-3 cannot partition.",
                "Build the module with sparse=False.",
            )
        if param.ds_id in self._waiting:
            if not get_accelerator().resolves_data_dependency():
                self.reduce_and_partition_stream.wait_stream(get_accelerator().current_stream())
            return
        super().reduce_ready_partitions_and_remove_grads(param)

    def reduce_independent_p_g_buckets_and_remove_grads(self, param: ZeroParameter) -> None:
        """Call the base class, unless buckets are bypassed: then the gradient goes into the arena at once."""
        is_complete = getattr(param, "ds_grad_is_ready", True)
        if not self.bypasses_buckets:
            super().reduce_independent_p_g_buckets_and_remove_grads(param)
            if is_complete:
                self._waiting[param.ds_id] = param
        elif is_complete and self._in_backward:
            self.partition_grads([param], [GET_GRAD(param)])
        elif is_complete:
            self._waiting[param.ds_id] = param

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Mark the engine's backward: a step that directly follows another backward refuses its gradients."""
        self._in_backward = True
        try:
            yield
        finally:
            self._in_backward = False

    def partition_grads(
        self, params_to_release: Sequence[ZeroParameter], grad_partitions: Sequence[torch.Tensor]
    ) -> None:
        """Write or add reduced gradient slices to the arena and release the full gradients.

        The first slice of a window replaces earlier values. The arena keeps track of it, because DeepSpeed's
        micro_step_id is wrong under reentrant checkpointing.
        """
        index = self.partition.index
        self.arena.arrive_all([index[param.ds_id] for param in params_to_release], grad_partitions)
        with torch._C.DisableTorchFunctionSubclass():
            for param in params_to_release:
                _drop_gradient(param)
                self._waiting.pop(param.ds_id, None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard this window's gradients, including those in the arena."""
        # Not by the base class: it would record a stream on them, which a CPU does not have.
        with torch._C.DisableTorchFunctionSubclass():  # for speed, as below
            for param in self.partition.params():
                _drop_gradient(param)
        with replaced(self, "fp16_groups", []):  # saves the base class's loop over all parameters
            super().zero_grad(set_to_none)
        self.arena.reset()
        if self.rank_state.activations is not None:
            self.rank_state.activations.gradients_are_gone()
        # Discard gradients that an interrupted backward left in the buckets.
        for bucket in self.ipg_buckets.values():
            bucket.params.clear()
            bucket.elements = 0
        self._waiting.clear()

    def backward_epilogue(self) -> None:
        """Call the base class, and release parameters kept gathered for retained graphs once no graph is retained."""
        if self.bypasses_buckets and self._waiting:
            waiting = list(self._waiting.values())
            self.partition_grads(waiting, [GET_GRAD(param) for param in waiting])
        self.retained.backward_ended()
        super().backward_epilogue()

    def _order_after_bucket_copies(self) -> None:
        # With overlap_comm, gradients are copied into the bucket on a separate stream. Autograd may add to such a
        # gradient later, on its own stream: it must wait for the copy.
        accelerator = get_accelerator()
        if accelerator.resolves_data_dependency() or self.reduce_and_partition_stream == accelerator.default_stream():
            return

        def ordered(param: ZeroParameter) -> Callable[[torch.Tensor], None]:
            def wait(gradient: torch.Tensor) -> None:
                if param.ds_id in self._waiting:
                    accelerator.current_stream().wait_stream(self.reduce_and_partition_stream)

            return wait

        for param in self.partition.params():
            self._grad_acc_hooks.append(param.register_hook(ordered(param)))


def _drop_gradient(param: ZeroParameter) -> None:
    gradient = GET_GRAD(param)
    if gradient is not None:
        if not get_accelerator().is_synchronized_device():
            gradient.record_stream(get_accelerator().current_stream())
        SET_GRAD(param, None)
