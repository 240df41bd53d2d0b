"""Tensors that stand for a partitioned parameter: each operation gathers it, computes, and partitions it again.

User code that touches a partitioned parameter outside a module's forward computes with a :class:`PartitionedTensor`. It
has the parameter's shape, dtype and device, and no memory. torch calls :meth:`PartitionedTensor.__torch_dispatch__` for
each operation on it:

- a view (``weight[0]``, ``weight.T``) is another such tensor, which remembers how it follows from the parameter;
- an operation in place changes the gathered parameter, which is then partitioned with its new values;
- every other operation returns an ordinary tensor.

Within a graph autograd keeps the tensor without memory and calls it again in backward, so that one parameter at a time
is gathered there, too. Every operation that gathers is collective.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch.utils._pytree import tree_leaves, tree_map

from lightning_smartinfinity.errors import SmartInfinityError, UnsupportedError
from lightning_smartinfinity.zero3.collectives import agree_to_gather
from lightning_smartinfinity.zero3.parameters.gathering import NO_GRAPH_TASK, describe, gathered, whole_data
from lightning_smartinfinity.zero3.parameters.unrounded import (
    is_fp32_in_memory,
    is_in_forward,
    is_rounded,
    unrounded,
    write_unrounded,
)
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["PartitionedTensor", "keep_values", "refuse_use_of_memory"]

# How a tensor follows from the one before: an operation that returns a view, its further arguments, and which of
# several results it is.
_View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]

_MANY_STAND_INS = 64


class PartitionedTensor(torch.Tensor):
    """A tensor without memory that stands for a parameter, or for a view of it.

    Attributes:
        param: The parameter, partitioned or whole.
        views: How the tensor follows from it.
        in_graph: Whether it stands for the parameter as a leaf of a graph, which nothing may change in place.
        is_gradient: Whether it stands for the parameter's gradient instead, which ranks have in parts.
        is_data: Whether it came from ``param.data``, by which autograd sees no change.
        kept: Its elements, if ``param.data`` was assigned since: in memory such a tensor keeps the old memory.
    """

    param: ZeroParameter
    views: tuple[_View, ...]
    in_graph: bool = False
    is_gradient: bool = False
    is_data: bool = False
    kept: torch.Tensor | None = None

    @staticmethod
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
        """Return a tensor (fp32) for the gradient that has arrived of a parameter in this accumulation window."""
        tensor = _whole_view(param, torch.float32)
        tensor.is_gradient = True
        return tensor

    def stands_for(self, param: ZeroParameter) -> bool:
        """Return whether this is the whole parameter as it is now."""
        return self.param is param and not self.views and self.kept is None and not self.is_gradient

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise UnsupportedError. torch asks no class about this function."""
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
            refuse_use_of_memory(next(arg for arg in args if isinstance(arg, cls)).param, _name_of(func))
        with torch._C.DisableTorchFunctionSubclass():
            if func in _FORMS:
                return _FORMS[func](args[0], *args[1:], **kwargs)
            if torch.is_grad_enabled():
                args, kwargs = _kept_for_backward(func, args, kwargs)
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if isinstance(error, (SmartInfinityError, torch.OutOfMemoryError)) or not _may_be_widened(func, args):
                    raise
                # torch has no such operation in 16 bit, or not with fp32 beside it; in memory the parameter is fp32.
                wider = tree_map(lambda leaf: leaf.float() if _is_rounded(leaf) else leaf, (tuple(args), kwargs))
                return func(*wider[0], **wider[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        returned = [value.alias_info for value in func._schema.returns]
        if func.namespace == "aten" and any(alias is not None and not alias.is_write for alias in returned):
            return _view(func, args, kwargs)
        if func._schema.name in _REFUSED_OPERATIONS:
            _refuse_shape(args[0].param, func._schema.name)
        if func._schema.name.startswith("aten::_foreach_"):
            return _one_by_one(func, args, kwargs)
        if func._schema.name in _JOINING:
            args, kwargs = tree_map(_copied, (tuple(args), kwargs))
            return func(*args, **kwargs)
        return _computed(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return self.clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.detach().clone())

    @property
    def data(self) -> torch.Tensor:
        """Such a tensor outside any graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        with torch.no_grad():
            self.copy_(value)


def refuse_use_of_memory(param: ZeroParameter, what: str) -> NoReturn:
    """Raise UnsupportedError: something saves, pickles or shares the memory of a partitioned parameter.

    Args:
        param: The parameter.
        what: What was called.
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
    """Puts a partitioned parameter into a graph; its gradient joins the others before the reduction."""

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
    """Give a partitioned parameter its shape without memory: autograd compares the shape of its gradient with it.

    All strides are 0, so that nothing takes the element for values. A parameter of one element is gathered.

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


def _made(param: ZeroParameter, views: tuple[_View, ...], like: torch.Tensor, offset: int) -> PartitionedTensor:
    with torch.inference_mode(False):  # otherwise torch could not make views of it
        tensor: PartitionedTensor = torch.Tensor._make_wrapper_subclass(
            PartitionedTensor,
            like.shape,
            strides=like.stride(),
            storage_offset=offset,
            dtype=like.dtype,
            device=param.device,
        )
    tensor.param, tensor.views = param, views
    param.__dict__.setdefault("_stand_ins", []).append(weakref.ref(tensor))
    if len(param.__dict__["_stand_ins"]) > _MANY_STAND_INS:
        param.__dict__["_stand_ins"] = [known for known in param.__dict__["_stand_ins"] if known() is not None]
    return tensor


def keep_values(param: ZeroParameter) -> None:
    """Give the tensors that stand for a parameter outside of graphs elements of their own, before it gets others."""
    known = [tensor for ref in param.__dict__.pop("_stand_ins", []) if (tensor := ref()) is not None]
    kept = [tensor for tensor in known if not tensor.in_graph and not tensor.is_gradient and tensor.kept is None]
    if kept:
        with torch.no_grad():
            now = PartitionedTensor.detached(param)
            values = now.float() if is_rounded(now.dtype) else now.clone()
        for tensor in kept:
            tensor.kept = _replayed(values, tensor)


def _view(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the views of a tensor that an operation makes: their geometry comes from a tensor without data."""
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


def _computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on gathered parameters."""
    tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, PartitionedTensor)}
    changed = _changed(func, args, kwargs)
    for tensor in changed:
        if tensor.in_graph and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    rounded = {key: tensor for key, tensor in tensors.items() if is_rounded(tensor.dtype) and not tensor.is_gradient}
    precise = _taken_in_fp32(func, rounded, changed, (args, kwargs))
    # Most operations ask for one dtype.
    narrow = any(_is_narrow(leaf) for leaf in tree_leaves((args, kwargs)))
    if precise and narrow:
        args, kwargs = tree_map(_widened, (tuple(args), kwargs))
    with ExitStack() as opened:
        real = _opened(list(tensors.values()), changed, precise, opened, puts_back=narrow)
        given = {id(value): tensors[key] for key, value in real.items()}
        args, kwargs = tree_map(lambda leaf: real.get(id(leaf), leaf), (tuple(args), kwargs))
        result = func(*args, **kwargs)
        # An operation in place returns what it was given.
        return tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _taken_in_fp32(
    func: Any, rounded: Mapping[int, PartitionedTensor], changed: Sequence[PartitionedTensor], arguments: Any
) -> Mapping[int, PartitionedTensor]:
    """Return, by id, those of the tensors in 16 bit that an operation takes in fp32, as parameters are in memory.

    What is written is written in fp32, and what meets wider tensors becomes as wide. Other reads give fp32 where the
    same parameter is fp32 in memory, except within forward: activations are in 16 bit there.
    """
    if not rounded:
        return {}
    outside = {key: each for key, each in rounded.items() if not (each.in_graph and torch.is_grad_enabled())}
    if any(id(tensor) in rounded for tensor in changed):
        return outside
    if torch._C._current_graph_task_id() != NO_GRAPH_TASK:
        return {}
    leaves = tree_leaves(arguments)
    if any(_is_wide(leaf, scalars=func._schema.is_mutable) for leaf in leaves):
        return outside
    if is_in_forward() or any(_is_narrow(leaf) and leaf.dim() > 0 for leaf in leaves):
        return {}
    return {key: each for key, each in rounded.items() if is_fp32_in_memory(each.param)}


def _is_wide(leaf: Any, *, scalars: bool) -> bool:
    # A tensor without dimensions does not widen the others, except where it takes the result.
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) and (scalars or leaf.dim() > 0) else leaf
    return dtype in (torch.float32, torch.float64)


def _is_rounded(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and is_rounded(leaf.dtype)


def _is_narrow(leaf: Any) -> bool:
    return _is_rounded(leaf) and not isinstance(leaf, PartitionedTensor)


def _widened(leaf: Any) -> Any:
    return leaf.float() if _is_narrow(leaf) else leaf


def _may_be_widened(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a function changes none of its arguments, of which one is a tensor of this kind in 16 bit."""
    changes = _name_of(func).endswith("_")
    return not changes and any(isinstance(leaf, PartitionedTensor) and _is_rounded(leaf) for leaf in tree_leaves(args))


def _opened(
    tensors: Sequence[PartitionedTensor],
    changed: Sequence[PartitionedTensor],
    in_fp32: Mapping[int, PartitionedTensor],
    opened: ExitStack,
    *,
    puts_back: bool,
) -> dict[int, torch.Tensor]:
    """Return the elements of each tensor by its id, until the stack is closed; then write what was changed.

    Args:
        tensors: The tensors.
        changed: Those of them that the operation changes.
        in_fp32: Those of them, by id, that it takes in fp32.
        opened: The stack.
        puts_back: Whether the operation has values in 16 bit, which may have been read here and are put back.
    """
    own = [tensor for tensor in tensors if not tensor.is_gradient and tensor.kept is None]
    params = dict.fromkeys(tensor.param for tensor in own)
    written = dict.fromkeys(tensor.param for tensor in changed if not tensor.is_gradient and tensor.kept is None)
    opened.enter_context(gathered(list(params), list(written)))
    for param in dict.fromkeys(tensor.param for tensor in changed if not tensor.is_data):
        if param in written and not param.is_inference():
            torch.autograd.graph.increment_version(param)  # a graph that has kept it is told so
    precise = dict.fromkeys(tensor.param for tensor in own if id(tensor) in in_fp32)
    values = {param: opened.enter_context(_unrounded(param, param in written, puts_back)) for param in precise}
    written = dict.fromkeys(tensor.param for tensor in changed if tensor.is_gradient)
    of_gradients = dict.fromkeys(tensor.param for tensor in tensors if tensor.is_gradient)
    if of_gradients and dist.get_world_size() > 1:
        agree_to_gather([param.ds_id for param in of_gradients], partial(describe, list(of_gradients), sys._getframe()))
    gradients = {param: opened.enter_context(_whole_gradient(param, param in written)) for param in of_gradients}

    def elements(tensor: PartitionedTensor) -> torch.Tensor:
        if tensor.kept is not None:
            return tensor.kept if id(tensor) in in_fp32 else tensor.kept.to(tensor.dtype)
        if tensor.is_gradient:
            return _replayed(gradients[tensor.param], tensor)
        return _replayed(values[tensor.param] if id(tensor) in in_fp32 else whole_data(tensor.param), tensor)

    return {id(tensor): elements(tensor) for tensor in tensors}


@contextmanager
def _unrounded(param: ZeroParameter, written: bool, puts_back: bool) -> Iterator[torch.Tensor]:
    # Within backward a read must not wait for an update, and may be of another parameter than it is about.
    in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
    values = whole_data(param).float() if in_backward and not written else unrounded(param)
    before = values.clone() if written and puts_back else None
    yield values
    if before is not None:
        unchanged = values == before.to(param.dtype).float()
        values.copy_(torch.where(unchanged, before, values))
    if written:
        write_unrounded(param, values)


@contextmanager
def _whole_gradient(param: ZeroParameter, written: bool) -> Iterator[torch.Tensor]:
    owner = param._z3_optimizer
    gradient = owner.get_fp32_grad_for_param(param)
    if gradient is None:
        raise UnsupportedError(
            f"The gradient of a parameter of shape {tuple(param.ds_shape)} is gone: a step has used it, or zero_grad() "
            "was called.",
            "Read it between backward and step, and clone() what is needed later.",
        )
    gradient = gradient.reshape(param.ds_shape).div_(owner.loss_scale)
    yield gradient
    if written:
        owner.set_fp32_grad_for_param(gradient.mul_(owner.loss_scale), param)


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[PartitionedTensor]:
    """Return the tensors that an operation changes."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    mutable = [named.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(mutable) if isinstance(leaf, PartitionedTensor)]


def _replayed(result: Any, tensor: PartitionedTensor) -> torch.Tensor:
    for func, rest, kwargs, index in tensor.views:
        result = func(result, *rest, **kwargs)
        if index is not None:
            result = result[index]
    return result  # type: ignore[no-any-return]


def _one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation over lists element by element, so that one parameter at a time is gathered."""
    lists = [each.name for each in func._schema.arguments if "List" in str(each.type) or "[]" in str(each.type)]
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    lists = [name for name in lists if isinstance(named.get(name), (list, tuple))]
    results = []
    for index in range(len(named[lists[0]])):
        one = {name: [value[index]] if name in lists else value for name, value in named.items()}
        results.append(_computed(func, (), one))
    return None if all(result is None for result in results) else [each for result in results for each in result]


def _kept_for_backward(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Copy constants of a graph that are trained: an update within backward may change them before they are used."""
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


def _name_of(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func))


def _numpy(tensor: PartitionedTensor, *args: Any, **kwargs: Any) -> Any:
    values = tensor.float() if is_fp32_in_memory(tensor.param) and is_rounded(tensor.dtype) else tensor.clone()
    array = values.numpy(*args, **kwargs)
    array.flags.writeable = False  # a write would not reach the parameter
    return array


def _array(tensor: PartitionedTensor, dtype: Any = None) -> Any:
    array = _numpy(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


Tensor = torch.Tensor
# Functions that hand the elements out in another form.
_FORMS: dict[object, Callable[..., Any]] = {
    Tensor.numpy: _numpy,
    Tensor.__array__: _array,
    Tensor.tolist: lambda tensor: tensor.clone().tolist(),
    Tensor.is_contiguous: lambda tensor, *args, **kwargs: _geometry(tensor).is_contiguous(*args, **kwargs),
    Tensor.is_shared: lambda tensor: False,
    Tensor.is_pinned: lambda tensor, *args, **kwargs: False,
}
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
# Operations that join tensors: each is copied, one at a time, since many may not be gathered at once.
_JOINING = {"aten::cat", "aten::stack", "aten::block_diag"}
_REFUSED_OPERATIONS = {
    *("aten::set_", "aten::resize_", "aten::resize_as_", "aten::as_strided_", "aten::t_", "aten::transpose_"),
    *("aten::squeeze_", "aten::unsqueeze_", "aten::swapaxes_", "aten::swapdims_"),
}


def _geometry(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), device="meta")
