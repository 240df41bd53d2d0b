"""Tensors that stand for a partitioned parameter: each operation gathers it, computes, and partitions it again.

User code that touches a partitioned parameter outside a module's forward computes with a :class:`PartitionedTensor`. It
has the parameter's shape, dtype and device, and no memory. torch calls :meth:`PartitionedTensor.__torch_dispatch__` for
each operation on it:

- a view (``weight[0]``, ``weight.T``) returns another such tensor, which records its view operations;
- an in-place operation changes the gathered parameter, which is then partitioned with its new values;
- every other operation returns an ordinary tensor.

Within a graph, autograd saves the tensor without memory and uses it again in backward. So backward, too, gathers one
parameter at a time. Every operation that gathers is collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NoReturn

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.utils._pytree import tree_leaves, tree_map

from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError
from lightning_smartinfinity.zero3.parameters.gathering import is_in_forward
from lightning_smartinfinity.zero3.parameters.operations import (
    StandIn,
    View,
    computed,
    is_narrow,
    may_be_widened,
    name_of,
    one_by_one,
    replayed,
)
from lightning_smartinfinity.zero3.parameters.unrounded import (
    is_fp32_in_memory,
    is_rounded,
)
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["PartitionedTensor", "keep_values", "refuse_use_of_memory"]


class PartitionedTensor(StandIn):
    """A tensor whose operations gather the parameter that it stands for."""

    @staticmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def of(param: ZeroParameter) -> PartitionedTensor:
        """Return a tensor for the parameter; within a graph its gradient is the parameter's.

        Args:
            param: The parameter.
        """
        if torch.is_grad_enabled() and param.requires_grad:
            tensor: PartitionedTensor = _AsLeaf.apply(param)
            return tensor
        return _whole_view(param)

    @staticmethod
    def detached(param: ZeroParameter) -> PartitionedTensor:
        """Return a tensor for the parameter outside any graph, as ``param.detach()`` is."""
        return _whole_view(param)

    @staticmethod
    def data_of(param: ZeroParameter) -> PartitionedTensor:
        """Return a tensor for the parameter outside any graph, as ``param.data`` is."""
        tensor = _whole_view(param)
        tensor.is_data = True
        return tensor

    @staticmethod
    def gradient(param: ZeroParameter) -> PartitionedTensor:
        """Return a tensor (fp32) for a parameter's gradient accumulated in this window."""
        tensor = _whole_view(param, torch.float32)
        tensor.is_gradient = True
        return tensor

    def stands_for(self, param: ZeroParameter) -> bool:
        """Return whether this tensor stands for the whole parameter with its present values."""
        return self.param is param and not self.views and self.kept is None and not self.is_gradient

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError. A method, because torch does not call ``__torch_function__`` for ``set_``."""
        _refuse_shape(self.param, "set_")

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if any(hasattr(each, "ds_status") for each in types):
            return NotImplemented  # a partitioned parameter among the arguments answers first
        kwargs = kwargs or {}
        if func in _REFUSED:
            refuse_use_of_memory(next(arg for arg in args if isinstance(arg, cls)).param, name_of(func))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FORMS:
                return _FORMS[func](args[0], *args[1:], **kwargs)
            if func in _LIKE and len(args) > 1 and isinstance(args[1], cls):
                return args[0].to(args[1].device, _dtype_in_memory(args[1]), *args[2:], **kwargs)
            if func is Tensor.__setitem__ and isinstance(args[2], int | float) and isinstance(args[0], cls):
                # torch would give the number the dtype of the tensor, which may have 16 bit.
                args = (*args[:2], torch.tensor(args[2], dtype=_dtype_in_memory(args[0])))
            if torch.is_grad_enabled():
                args, kwargs = _kept_for_backward(func, args, kwargs)
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if isinstance(error, (SmartInfinityError, torch.OutOfMemoryError)) or not may_be_widened(func, args):
                    raise
                # torch lacks the operation in 16 bit or with mixed dtypes; in memory, the parameter would be fp32.
                wider = tree_map(lambda leaf: leaf.float() if is_narrow(leaf) else leaf, (tuple(args), kwargs))
                return func(*wider[0], **wider[1])

    @classmethod
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it gathers and writes, which is not for compilers
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].param.device
        returned = [value.alias_info for value in func._schema.returns]
        if func.namespace == "aten" and any(alias is not None and not alias.is_write for alias in returned):
            return _view(func, args, kwargs)
        if func._schema.name in _REFUSED_OPERATIONS:
            _refuse_shape(args[0].param, func._schema.name)
        if func._schema.name.startswith("aten::_foreach_"):
            return one_by_one(func, args, kwargs)
        if func._schema.name in _JOINING:
            args, kwargs = tree_map(_copied, (tuple(args), kwargs))
            return func(*args, **kwargs)
        return computed(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return self.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.detach().clone())

    @property
    def data(self) -> torch.Tensor:
        """The same tensor outside any graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)


def refuse_use_of_memory(param: ZeroParameter, what: str) -> NoReturn:
    """Raise UnsupportedError: the memory of a partitioned parameter cannot be saved, pickled or shared.

    Args:
        param: The parameter.
        what: Name of the function that was called.
    """
    raise UnsupportedError(
        f"{what} needs the memory of a parameter of shape {tuple(param.ds_shape)}, which ZeRO-3 has partitioned: it "
        "cannot be saved, pickled or shared.",
        "Write the model by save_pretrained(folder), a method of the strategy and of SmartInfinityTraining, or a "
        "checkpoint's by `smart-infinity export`. For a single parameter pass param.detach().clone(), which gathers "
        "it, on every rank.",
    )


def _refuse_shape(param: ZeroParameter, what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what} would give a parameter of shape {tuple(param.ds_shape)} another shape or other memory; ZeRO-3 has "
        "partitioned it.",
        "Write values by copy_(), or replace the parameter before the fit.",
    )


class _AsLeaf(torch.autograd.Function):
    """Puts a partitioned parameter into a graph; its gradient is accumulated with others before the reduction."""

    @staticmethod
    def forward(ctx: Any, param: ZeroParameter) -> PartitionedTensor:
        ctx.param = param
        tensor = _whole_view(param)
        tensor.in_graph = True
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if _take_shape(ctx.param):
            torch.autograd.Variable._execution_engine.queue_callback(partial(_leave_shape, ctx.param))
        if isinstance(gradient, PartitionedTensor):
            gradient = gradient.clone()
        return gradient

    @classmethod
    def apply(cls, param: ZeroParameter) -> Any:
        taken = _take_shape(param)
        try:
            return super().apply(param)  # type: ignore[no-untyped-call]
        finally:
            if taken:
                _leave_shape(param)


def _take_shape(param: ZeroParameter) -> bool:
    """Give a partitioned parameter its shape without memory, because autograd compares its gradient's shape with it.

    All strides are 0, so that the element is not mistaken for values. A parameter of one element is gathered instead.

    Returns:
        Whether the parameter was partitioned.
    """
    if param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
        return False
    if param.ds_numel == 1:
        param.all_gather()
    else:
        with torch._C.DisableTorchFunctionSubclass():
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.ds_shape)
    return True


def _leave_shape(param: ZeroParameter) -> None:
    if param.ds_status is ZeroParamStatus.NOT_AVAILABLE:
        with torch._C.DisableTorchFunctionSubclass():
            param.data = torch.empty(0, dtype=param.dtype, device=param.device)
    elif param.ds_numel == 1 and not param.ds_active_sub_modules:
        param.partition()


def _whole_view(param: ZeroParameter, dtype: torch.dtype | None = None) -> PartitionedTensor:
    with torch._C.DisableTorchFunctionSubclass():
        return _made(param, (), torch.empty(param.ds_shape, dtype=dtype or param.dtype, device="meta"), 0)


def _made(param: ZeroParameter, views: tuple[View, ...], like: torch.Tensor, offset: int) -> PartitionedTensor:
    with torch.inference_mode(False):  # otherwise torch could not make views of it
        tensor: PartitionedTensor = torch.Tensor._make_wrapper_subclass(
            PartitionedTensor,
            like.shape,
            strides=like.stride(),
            storage_offset=offset,
            dtype=like.dtype,
            device=torch.device(
                "meta"
            ),  # torch refuses this one as the data of an ordinary tensor, which it would take otherwise
            dispatch_device=True,
            _extra_dispatch_keys=_autocast_of(param.device.type),
        )
    tensor.param, tensor.views = param, views
    known = param.__dict__.setdefault("_stand_ins", set())
    known.add(weakref.ref(tensor, known.discard))  # hashes of tensors are their ids: none is compared by value
    return tensor


@cache
def _autocast_of(kind: str) -> torch._C.DispatchKeySet:
    """Return the dispatch key of torch's autocast for a kind of device; an empty set if it has none."""
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}", torch._C.DispatchKey.Undefined)
    return torch._C.DispatchKeySet(key)


def keep_values(param: ZeroParameter) -> None:
    """Copy a parameter's values into the tensors that stand for it outside of graphs, before new data is assigned."""
    refs = list(param.__dict__.pop("_stand_ins", ()))  # a tensor that ends elsewhere takes itself out of the set
    known = [tensor for ref in refs if (tensor := ref()) is not None]
    kept = [tensor for tensor in known if not tensor.in_graph and not tensor.is_gradient and tensor.kept is None]
    if kept:
        with torch.no_grad():
            now = PartitionedTensor.detached(param)
            values = now.float() if is_rounded(now.dtype) else now.clone()
        for tensor in kept:
            tensor.kept = replayed(values, tensor)


def _view(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the views of a tensor that an operation makes; their geometry is computed on a meta tensor."""
    source, rest = args[0], tuple(args[1:])
    model = torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device="meta")
    results = func(model, *rest, **kwargs)

    def like(result: torch.Tensor, index: int | None) -> PartitionedTensor:
        views = (*source.views, (func, rest, kwargs, index))
        view = _made(source.param, views, result, source.storage_offset() + result.storage_offset())
        view.in_graph, view.is_gradient, view.is_data = source.in_graph, source.is_gradient, source.is_data
        if source.kept is not None:
            kept = func(source.kept, *rest, **kwargs)
            view.kept = kept if index is None else kept[index]
        return view

    if isinstance(results, torch.Tensor):
        return like(results, None)
    return [like(result, index) for index, result in enumerate(results)]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, PartitionedTensor) else leaf


def _kept_for_backward(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Copy trained parameters that are constants of a graph: an update in backward may change them before their use."""
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if getattr(func, "__name__", "").rstrip("_") != getattr(func, "__name__", "") or not any(
        leaf.requires_grad for leaf in leaves
    ):
        return args, kwargs

    def kept(leaf: Any) -> Any:
        trained = isinstance(leaf, PartitionedTensor) and not leaf.requires_grad and leaf.param.requires_grad
        return leaf.detach().clone() if trained else leaf

    result: tuple[Sequence[Any], dict[str, Any]] = tree_map(kept, (tuple(args), kwargs))
    return result


def _numpy(tensor: PartitionedTensor, *args: Any, **kwargs: Any) -> Any:
    values = tensor.float() if is_fp32_in_memory(tensor.param) and is_rounded(tensor.dtype) else tensor.clone()
    array = values.numpy(*args, **kwargs)
    array.flags.writeable = False  # a write would not reach the parameter
    return array


def _dtype_in_memory(tensor: PartitionedTensor) -> torch.dtype:
    is_fp32 = is_rounded(tensor.dtype) and is_fp32_in_memory(tensor.param) and not is_in_forward()
    return torch.float32 if is_fp32 else tensor.dtype


def _array(tensor: PartitionedTensor, dtype: Any = None) -> Any:
    array = _numpy(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


Tensor = torch.Tensor
# Functions that return the elements in another form, or properties of the tensor.
_FORMS: dict[object, Callable[..., Any]] = {
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.cpu: lambda tensor, *args, **kwargs: tensor.clone().cpu(*args, **kwargs),  # from a GPU it is a copy, too
    Tensor.tolist: lambda tensor: tensor.clone().tolist(),
    Tensor.is_contiguous: lambda tensor, *args, **kwargs: _geometry(tensor).is_contiguous(*args, **kwargs),
    Tensor.is_shared: lambda tensor: False,
    Tensor.is_pinned: lambda tensor, *args, **kwargs: False,
}
# Functions that give one tensor the dtype of another.
_LIKE = {Tensor.type_as, Tensor.to}
# Functions that save, pickle or share memory.
_REFUSED: set[object] = {
    Tensor.__reduce_ex__,
    Tensor.__dlpack__,
    Tensor.data_ptr,
    Tensor.storage,
    Tensor.untyped_storage,
    Tensor.share_memory_,
    Tensor.set_,
    Tensor.resize_,
}
# Operations that join tensors: each tensor is copied, one at a time, because all gathered at once may not fit.
_JOINING = {"aten::cat", "aten::stack", "aten::block_diag"}
_REFUSED_OPERATIONS = {
    *("aten::set_", "aten::resize_", "aten::resize_as_", "aten::as_strided_", "aten::t_", "aten::transpose_"),
    *("aten::squeeze_", "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_"),
}


def _geometry(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
