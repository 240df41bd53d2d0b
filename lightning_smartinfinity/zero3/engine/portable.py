"""The engine that runs a model with partitioned parameters, and the one that evaluates it without an optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial

# Imported here, since DeepSpeed would otherwise import it while its base class is replaced (see below).
import deepspeed.runtime.superoffload.superoffload_stage3  # noqa: F401
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.optimizer.storage_optimizer import StorageOptimizer
from lightning_smartinfinity.zero3.optimizer.taken_optimizer import refuse_foreign_steps
from lightning_smartinfinity.zero3.parameters.deepspeed_patches import (
    hold_top_module_weakly,
    read_trace_lazily,
    restoring_stack,
    retrace_for_external_parameters,
)
from lightning_smartinfinity.zero3.parameters.foreign_errors import naming_dtypes
from lightning_smartinfinity.zero3.parameters.gathering import end_gathers, engine_has_turn, in_forward
from lightning_smartinfinity.zero3.parameters.live_parameters import keep_within_budget
from lightning_smartinfinity.zero3.parameters.module_copies import copy_without_hooks
from lightning_smartinfinity.zero3.parameters.module_guard import (
    guard_modules,
)
from lightning_smartinfinity.zero3.parameters.module_values import accept_any_output, answer_values
from lightning_smartinfinity.zero3.parameters.norm_statistics import keep_statistics
from lightning_smartinfinity.zero3.parameters.partitioned_parameter import answer_in, answering
from lightning_smartinfinity.zero3.parameters.partitioning import (
    cast_parameters,
    having_a_parameter,
    partitioning,
    whole_bytes,
)
from lightning_smartinfinity.zero3.parameters.status import engine_at_work
from lightning_smartinfinity.zero3.parameters.torch_functions import (
    ScalarsAsBytes,
    autocast_of_caller,
    linear_of_partitions,
    putting_torch_back,
)
from lightning_smartinfinity.zero3.ranks.collectives import (
    broadcast_buffers,
    reading_group,
)
from lightning_smartinfinity.zero3.ranks.locations import note_model
from lightning_smartinfinity.zero3.ranks.watchdog import naming_lost_rank

__all__ = ["EvaluationEngine", "PortableEngine"]


class PortableEngine(DeepSpeedEngine):
    """A ``DeepSpeedEngine`` with this package's changes to ZeRO-3's parameters, and fp16 on every device of torch."""

    module: torch.nn.Module
    optimizer: StorageOptimizer | DeepSpeedZeRoOffload

    def __init__(self, **kwargs: object) -> None:
        refuse_foreign_steps()
        self._partitioning = ExitStack()
        self._was_broken_off = False
        with self._partitioning, answering(), putting_torch_back():
            super().__init__(**kwargs)
        offload = getattr(self.optimizer, "parameter_offload", self.optimizer)
        retrace_for_external_parameters(offload)
        read_trace_lazily(offload)
        hold_top_module_weakly(offload)
        keep_within_budget(offload)
        accept_any_output(offload)
        answer_in(self.module)
        answer_values(self.module)
        copy_without_hooks(self.module)
        guard_modules(offload)
        if self.bfloat16_enabled() or self.fp16_enabled():
            keep_statistics(self.module)
        note_model(self)
        if torch.distributed.get_world_size() > 1:
            reading_group()  # creating it is collective, and all ranks are here

    def destroy(self) -> None:
        """Remove all hooks from the module, including two that the base class leaves."""
        super().destroy()
        for name in ("module_forward_pre_hook", "module_forward_post_hook"):
            if (handle := vars(self).get(name)) is not None:
                handle.remove()

    def _configure_distributed_model(self, model: torch.nn.Module) -> None:
        # If zero.Init has partitioned any parameter, the base class casts none: others, that were copied or assigned,
        # still need the dtype. If it has not, the base class would cast without returning freed memory.
        if self.bfloat16_enabled() or self.fp16_enabled():
            cast_parameters(model.parameters(), torch.bfloat16 if self.bfloat16_enabled() else torch.float16)
        super()._configure_distributed_model(model)
        # DeepSpeed broadcasts parameters only.
        broadcast_buffers(model, self.seq_data_parallel_group, device=self.device)
        nbytes = whole_bytes(model)
        if nbytes:
            self._partitioning.enter_context(partitioning("Partitioning the model", nbytes))

    def _broadcast_model(self) -> None:
        with ScalarsAsBytes():
            super()._broadcast_model()

    def forward(self, *inputs: object, **kwargs: object) -> object:
        """Run forward like the base class.

        Raises:
            RankLostError: Another rank is missing.
        """
        with (
            naming_lost_rank(),
            engine_has_turn(),
            self._mending_gathers(),
            self._linear_of_partitions(),
            autocast_of_caller(),
            in_forward(),
            engine_at_work(),
            naming_dtypes(in_16_bit=self.bfloat16_enabled() or self.fp16_enabled()),
        ):
            return super().forward(*inputs, **kwargs)

    def _linear_of_partitions(self) -> AbstractContextManager[None]:
        return linear_of_partitions(wanted=self._config.zero_config.memory_efficient_linear)

    @contextmanager
    def _mending_gathers(self) -> Iterator[None]:
        """On first entry after an interrupt or error in this context, end the interrupted gathers."""
        if self._was_broken_off:
            end_gathers(self.module)
            self._was_broken_off = False
        try:
            with restoring_stack():
                yield
        except BaseException:
            self._was_broken_off = True
            raise

    @contextmanager
    def gathering_trained_only(self, only: bool) -> Iterator[None]:
        """Leave frozen parameters out of the whole model's state dicts that are requested within this context.

        Args:
            only: Whether to leave them out; if false, the context changes nothing.
        """
        if not only:
            yield
            return
        gather_trained = partial(self._zero3_consolidated_16bit_state_dict, exclude_frozen_parameters=True)
        with replaced(self, "_zero3_consolidated_16bit_state_dict", gather_trained):
            yield

    def _do_sanity_check(self) -> None:
        # On a CPU, DeepSpeed requires oneDNN's fp16 kernels. torch's own kernels are slower but run on every CPU.
        with replaced(get_accelerator(), "is_fp16_supported", _computes_fp16):
            if self.fp16_enabled() and not _computes_fp16():
                raise UnsupportedError(
                    f"torch cannot train in fp16 on {get_accelerator().device_name()!r} here.",
                    "Use precision='bf16-mixed' or '32-true'.",
                )
            super()._do_sanity_check()


class EvaluationEngine(PortableEngine):
    """An engine without an optimizer.

    Args:
        model: The model, as ``deepspeed.initialize`` passes it to ``DeepSpeedEngine``. It may have no parameters.
        **kwargs: Further arguments, passed in the same way.
    """

    optimizer: DeepSpeedZeRoOffload

    def __init__(self, *, model: torch.nn.Module, **kwargs: object) -> None:
        with having_a_parameter(model):
            super().__init__(model=model, **kwargs)

    def backward(self, *args: object, **kwargs: object) -> None:
        """Raise UnsupportedError: there is no optimizer for the gradients."""
        raise UnsupportedError(
            f"backward was called for {type(self.module).__name__}, which was set up without an optimizer.",
            "Pass the loss to the model that is trained. An Accelerator trains the model that it has prepared first: "
            "prepare that one before others, or leave the others unprepared.",
        )


def _computes_fp16() -> bool:
    """Return whether a matrix product in fp16, forward and backward, runs on the training device."""
    device = get_accelerator().current_device_name()
    try:
        weight = torch.ones(2, 2, dtype=torch.float16, device=device, requires_grad=True)
        torch.autograd.backward((weight @ weight).sum())
    except RuntimeError:
        return False
    return True
