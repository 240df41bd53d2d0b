"""Parameters that behave in user code like whole parameters while ZeRO-3 has partitioned them.

ZeRO-3 marks a parameter by ``ds_status`` and leaves its tensor empty while it is partitioned. Here that attribute also
switches the parameter's class: :class:`WholeParameter`, without overhead, while it is gathered and an engine runs
forward or backward; at other times :class:`PartitionedParameter`, which answers for the whole parameter. DeepSpeed and
this package still see the empty tensor (see callers.py).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import (
    Init,
    ZeroParamStatus,
    is_zero_param,
)
from torch.utils._pytree import tree_map

from lightning_smartinfinity.common.patches import wrapped
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.callers import is_building, is_ours, is_vmap, moves_module
from lightning_smartinfinity.zero3.parameters.gather_methods import (
    Gather,
    GatherNow,
    PartitionKeepingWrites,
)
from lightning_smartinfinity.zero3.parameters.gathering import NO_GRAPH_TASK, is_in_context, whole_data
from lightning_smartinfinity.zero3.parameters.gradients import GET_GRAD, SET_GRAD, gradient_of, set_gradient
from lightning_smartinfinity.zero3.parameters.partitioned_tensor import (
    PartitionedTensor,
    keep_values,
    refuse_use_of_memory,
)
from lightning_smartinfinity.zero3.parameters.status import Classes, Status, is_engine_at_work
from lightning_smartinfinity.zero3.parameters.torch_functions import sendable
from lightning_smartinfinity.zero3.parameters.unrounded import (
    is_fp32_in_memory,
    note_fp32_in_memory,
)
from lightning_smartinfinity.zero3.untyped import ZeroInit, ZeroParameter

__all__ = [
    "ANSWERS",
    "UNAFFECTED",
    "answer_in",
    "answering",
    "notify_of_writes",
    "wait_before_gather",
]

Tensor = torch.Tensor
ANSWERS: dict[object, Callable[..., object]] = {
    Tensor.shape.__get__: lambda param: torch.Size(param.ds_shape),  # type: ignore[attr-defined]
    Tensor.ndim.__get__: lambda param: len(param.ds_shape),  # type: ignore[attr-defined]
    Tensor.size: lambda param, dim=None: torch.Size(param.ds_shape) if dim is None else param.ds_shape[dim],
    Tensor.dim: lambda param: len(param.ds_shape),
    Tensor.numel: lambda param: param.ds_numel,
    Tensor.nelement: lambda param: param.ds_numel,
    torch.numel: lambda param: param.ds_numel,
    Tensor.nbytes.__get__: lambda param: param.ds_numel * param.element_size(),  # type: ignore[attr-defined]
}
"""Torch functions that a partitioned parameter answers without its values."""

UNAFFECTED: set[object] = {
    getattr(Tensor, name).__get__
    for name in (
        *("device", "dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta", "layout", "requires_grad"),
        *("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "is_sparse", "is_nested", "is_quantized"),
        *("retains_grad", "is_mkldnn", "is_xpu", "is_mps", "output_nr", "itemsize"),
    )
} | {
    getattr(Tensor, name).__set__ for name in ("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
} | {
    *(Tensor.requires_grad_, Tensor.is_floating_point, Tensor.is_complex, torch.is_floating_point, torch.is_complex),
    *(Tensor.element_size, Tensor.get_device, Tensor.register_hook, Tensor.register_post_accumulate_grad_hook),
    *(Tensor.is_inference, Tensor.retain_grad, Tensor.__hash__, Tensor.is_signed),
}  # fmt: skip
"""Torch functions whose result does not depend on whether a parameter is partitioned."""

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
# Functions that search a graph for parameters.
_DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
_DETACHING = {Tensor.detach, torch.detach}
_ABOUT_ONE = {*ANSWERS, *_DETACHING}


_APPLY = torch.nn.Module._apply


class _ZeroParameter(torch.nn.Parameter):
    """One of ZeRO-3's parameters; its class follows its status (see status.py)."""

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Do what torch's ``set_`` does; for user code, copy the values of another tensor.

        A method, because torch does not call ``__torch_function__`` for ``set_``.
        """
        if is_building() or is_in_context(self) or is_ours(sys._getframe(1)) or not isinstance(source, torch.Tensor):
            return super().set_(source, *args, **kwargs)
        _write(self, source)
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> torch.nn.Parameter:
        """Return a copy, partitioned over the same ranks. Collective.

        Within GatheredParameters, and while a model is built, the copy is an ordinary parameter.
        """
        with torch.no_grad():
            values = PartitionedTensor.detached(self).clone().to(self.dtype)
        copied = torch.nn.Parameter(values, requires_grad=self.requires_grad)
        if not (is_building() or is_in_context(self)):
            with answering():
                self.convert_to_zero_parameters(param_list=[copied])  # type: ignore[attr-defined]
            if is_fp32_in_memory(self):
                note_fp32_in_memory([copied])
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        if not torch_computes(self):
            refuse_use_of_memory(self, "pickle")
        plain: Any = torch.nn.Parameter(whole_data(self), requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)


class _HiddenParameter(_ZeroParameter):
    """A parameter that DeepSpeed is gathering or partitioning; it answers functions that another thread calls."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in UNAFFECTED or is_ours(sys._getframe(1)) or moves_module(sys._getframe(1)):
                return func(*args, **kwargs)
            if torch._C._functorch.maybe_current_level() is not None or is_vmap(sys._getframe(1)):
                raise UnsupportedError(
                    "A transform of torch.func, such as vmap, was given a parameter that ZeRO-3 has partitioned.",
                    "Take param.clone() before it, and use that within it: its gradient reaches the parameter.",
                )
            # Most functions about one tensor take it as the first argument, or as the keyword `input` or `self`.
            first = args[0] if args else kwargs.get("input", kwargs.get("self"))
            if func in _DIFFERENTIATING or (func in _ABOUT_ONE and torch_computes(first)):
                return func(*args, **kwargs)
            if func in ANSWERS:
                rest = {key: value for key, value in kwargs.items() if key not in ("input", "self")}
                return ANSWERS[func](first, *args[1:], **rest)
            if func in _DETACHING:
                # `nn.Parameter(param)` detaches its argument, and would share the memory of a partitioned parameter.
                if sys._getframe(1).f_code is torch.nn.Parameter.__new__.__code__:
                    _refuse_tie(first)
                return PartitionedTensor.detached(first)
            stand_ins: dict[int, tuple[PartitionedTensor, ZeroParameter]] = {}

            def stand_in(leaf: Any) -> Any:
                if not isinstance(leaf, _HiddenParameter) or torch_computes(leaf):
                    return leaf
                if id(leaf) not in stand_ins:
                    stand_ins[id(leaf)] = (PartitionedTensor.of(leaf), leaf)
                return stand_ins[id(leaf)][0]

            args, kwargs = tree_map(stand_in, (tuple(args), kwargs))
            if not stand_ins:
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        # An operation that works in place or changes nothing returns its argument: the parameter itself.
        back = {id(tensor): param for tensor, param in stand_ins.values()}
        return back.get(id(result), result) if isinstance(result, PartitionedTensor) else result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if is_ours(sys._getframe(1)):
            return f"PartitionedParameter of shape {tuple(self.ds_shape)}"  # type: ignore[attr-defined]
        return repr(self._whole_copy())

    def __format__(self, format_spec: str) -> str:
        return format(self._whole_copy(), format_spec)

    def _whole_copy(self) -> torch.nn.Parameter:
        with torch.no_grad():
            return torch.nn.Parameter(PartitionedTensor.detached(self).clone(), requires_grad=self.requires_grad)


class _WatchedParameter(torch.nn.Parameter):
    """A parameter whose status, memory and gradient are watched."""

    ds_status = Status()

    @property
    def data(self) -> torch.Tensor:
        """The memory; for user code outside of GatheredParameters, a tensor that stays valid after partitioning."""
        if is_building() or _memory_is_the_users(self) or is_ours(sys._getframe(1)):
            return sendable(whole_data(self), sys._getframe(1))
        return PartitionedTensor.data_of(self)

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if is_building() or _memory_is_the_users(self) or is_ours(sys._getframe(1)):
            with torch._C.DisableTorchFunctionSubclass():
                _SET_DATA(self, value)
        else:
            _write(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        """Autograd's gradient; for user code between backward and step, the gradient reduced over the ranks."""
        with torch._C.DisableTorchFunctionSubclass():
            return GET_GRAD(self) if is_ours(sys._getframe(1)) else gradient_of(self)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if is_ours(sys._getframe(1)):
                SET_GRAD(self, value)
            else:
                set_gradient(self, value)


class PartitionedParameter(_WatchedParameter, _HiddenParameter):
    """A parameter that is partitioned, or may be soon: it answers for the whole parameter, or gathers it."""


class WholeParameter(_WatchedParameter, _ZeroParameter):
    """A gathered parameter while an engine runs; operations on it are torch's own."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def _memory_is_the_users(param: ZeroParameter) -> bool:
    """Return whether a parameter is gathered, and user code may use or replace its memory."""
    is_whole: bool = param.__dict__["ds_status"] is ZeroParamStatus.AVAILABLE
    return is_whole and (is_building() or is_in_context(param))


def torch_computes(param: ZeroParameter) -> bool:
    """Return whether operations on a parameter are torch's own: it is gathered, and stays so until they have run."""
    return _memory_is_the_users(param) or (
        param.__dict__["ds_status"] is ZeroParamStatus.AVAILABLE
        and (
            is_engine_at_work()
            or bool(param.ds_active_sub_modules)
            or torch._C._current_graph_task_id() != NO_GRAPH_TASK
        )
    )


@cache
def _classes_of(own: type[torch.nn.Parameter]) -> Classes:
    """Return the classes for parameters of class ``own``; they inherit from a user's subclass."""
    classes = (PartitionedParameter, WholeParameter, _HiddenParameter)
    if own is torch.nn.Parameter:
        return Classes(*classes)
    return Classes(*(type(own.__name__, (base, own), {}) for base in classes))


def answer(params: Iterable[torch.nn.Parameter]) -> None:
    """Make ZeRO-3's parameters behave like whole parameters in user code from now on.

    Args:
        params: The parameters; those that ZeRO-3 has not taken over stay unchanged.
    """
    for param in params:
        if is_zero_param(param) and not isinstance(param, _ZeroParameter):
            zero: ZeroParameter = param
            status = zero.__dict__.pop("ds_status")
            zero.__dict__.pop("item", None)  # DeepSpeed's item() would leave the parameter gathered
            zero.__dict__.update(_classes=_classes_of(type(param)), _self=weakref.ref(param))
            zero.__class__ = WholeParameter
            zero.partition = PartitionKeepingWrites(zero, zero.partition)
            zero.all_gather = GatherNow(zero, zero.all_gather)
            zero.all_gather_coalesced = Gather(zero, zero.all_gather_coalesced)
            zero.was_written = False
            zero.ds_status = status


def answer_in(module: torch.nn.Module) -> None:
    """Call :func:`answer` for all parameters of an engine's module.

    Args:
        module: The engine's module.
    """
    params = list(module.parameters())
    answer(params)
    for param in params:
        param.__dict__["_in_flight_registry"] = module.ds_inflight_param_registry


def answering() -> AbstractContextManager[None]:
    """Call :func:`answer` for every parameter that ZeRO-3 takes over within this context."""

    def convert(original: Callable[..., None], init: ZeroInit, param: ZeroParameter) -> None:
        original(init, param)
        answer([param])

    return wrapped(Init, "_convert_to_deepspeed_param", convert)


def notify_of_writes(param: ZeroParameter, note: Callable[[Iterable[ZeroParameter]], None] | None) -> None:
    """Set the function to call with the parameters after a write outside of a step; None for no function."""
    answer([param])
    param.__dict__["_note_writes"] = note


def wait_before_gather(param: ZeroParameter, wait: Callable[[Iterable[ZeroParameter]], None] | None) -> None:
    """Set the function that a gather of the parameter calls first, with all parameters it gathers; None for none."""
    answer([param])
    param.__dict__["_before_gather"] = wait


def _write(param: ZeroParameter, value: torch.Tensor) -> None:
    """Do what ``param.data = value`` does for a whole parameter, as far as ZeRO-3 allows."""
    if value is param or (isinstance(value, PartitionedTensor) and value.stands_for(param)):
        return
    # Frame 1 is the setter of `data`, and frame 2 its caller.
    moved = sys._getframe(2).f_code is _APPLY.__code__
    if moved and value.dtype != param.dtype:
        raise UnsupportedError(
            f"Module.to() and its like were asked to turn parameters of {param.dtype} into {value.dtype}; their dtype "
            "is that of the training.",
            "Choose it by the precision of Trainer, Fabric or TrainingArguments.",
        )
    if moved and (value.numel() == 0 or value.device != param.device):
        if param.ds_status is not ZeroParamStatus.AVAILABLE:
            _SET_DATA(param, value)  # the empty tensor
        return
    if value.shape != torch.Size(param.ds_shape):
        raise UnsupportedError(
            f"A parameter of shape {tuple(param.ds_shape)} was given the shape {tuple(value.shape)}; ZeRO-3 has "
            "partitioned it.",
            "Replace the whole parameter, module.name = torch.nn.Parameter(...), before the fit, or give it its final "
            "shape in the constructor of its module.",
        )
    keep_values(param)
    with torch.no_grad():
        PartitionedTensor.data_of(param).copy_(value)


def _refuse_tie(param: ZeroParameter) -> None:
    raise UnsupportedError(
        f"torch.nn.Parameter(...) was given a parameter of shape {tuple(param.ds_shape)} that ZeRO-3 has partitioned.",
        "Pass param.detach().clone() for a copy; to tie two modules, assign one parameter to both.",
    )
