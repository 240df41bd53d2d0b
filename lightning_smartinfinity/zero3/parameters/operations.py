"""Runs operations on tensors that stand for partitioned parameters: gathers these, and keeps changes to them.

In a mixed precision, parameters are fp32 for training in memory, and 16-bit here. This module also decides which
arguments an operation gets in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.gathering import (
    NO_GRAPH_TASK,
    describe,
    gathered,
    is_in_forward,
    whole_data,
)
from lightning_smartinfinity.zero3.parameters.status import training_of
from lightning_smartinfinity.zero3.parameters.unrounded import (
    is_fp32_in_memory,
    is_rounded,
    unrounded,
    write_unrounded,
)
from lightning_smartinfinity.zero3.ranks.collectives import agree_to_gather
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["StandIn", "View", "computed", "is_narrow", "may_be_widened", "name_of", "one_by_one", "replayed"]

# One step from a tensor to its view: the operation, its further arguments, and the index among several results.
View = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], int | None]


class StandIn(torch.Tensor):
    """A tensor without memory that stands for a parameter, or for a view of it.

    Attributes:
        param: The parameter, partitioned or whole.
        views: The view operations that lead from the parameter to this tensor.
        in_graph: Whether it stands for the parameter as a leaf of a graph, which must not be changed in place.
        is_gradient: Whether it stands for the parameter's gradient, of which each rank has a slice.
        is_data: Whether it came from ``param.data``, whose changes autograd does not see.
        kept: Its elements, if ``param.data`` was assigned since: in plain torch, such a tensor keeps the old memory.
    """

    param: ZeroParameter
    views: tuple[View, ...]
    in_graph: bool = False
    is_gradient: bool = False
    is_data: bool = False
    kept: torch.Tensor | None = None


def computed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation on gathered parameters."""
    leaves, spec = tree_flatten((tuple(args), kwargs))
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, StandIn)}
    changed = _changed(func, args, kwargs)
    for tensor in changed:
        if tensor.in_graph and torch.is_grad_enabled():
            raise RuntimeError("a leaf Variable that requires grad is being used in an in-place operation.")
    precise = _taken_in_fp32(func, leaves, changed)
    # Most operations require a single dtype.
    narrow = any(map(_is_plain_narrow, leaves))
    if precise and narrow:
        leaves = [leaf.float() if _is_plain_narrow(leaf) else leaf for leaf in leaves]
    with ExitStack() as opened:
        real = _opened(list(tensors.values()), changed, precise, opened, puts_back=narrow)
        given = {id(value): tensors[key] for key, value in real.items()}
        args, kwargs = tree_unflatten([real.get(id(leaf), leaf) for leaf in leaves], spec)
        result = func(*args, **kwargs)
        # An in-place operation returns its argument: return the stand-in, not the gathered tensor.
        return tree_map(lambda leaf: given.get(id(leaf), leaf), result)


def _taken_in_fp32(func: Any, leaves: Sequence[Any], changed: Sequence[StandIn]) -> Mapping[int, StandIn]:
    """Return, by id, the 16-bit arguments that an operation gets in fp32, as for training in memory.

    Writes, and operations with wider tensors, are done in fp32, except for leaves of a graph. Other reads give fp32 if
    the parameter is fp32 for training in memory, but 16 bit in forward, in backward and next to plain 16-bit tensors.
    """
    rounded = {
        id(leaf): leaf for leaf in leaves if isinstance(leaf, StandIn) and is_narrow(leaf) and not leaf.is_gradient
    }
    if not rounded:
        return {}
    outside = {key: each for key, each in rounded.items() if not (each.in_graph and torch.is_grad_enabled())}
    if any(id(tensor) in rounded for tensor in changed):
        return outside
    if any(_is_wide(leaf, scalars=func._schema.is_mutable) for leaf in leaves):
        return outside
    in_backward = torch._C._current_graph_task_id() != NO_GRAPH_TASK
    if in_backward or is_in_forward() or any(_is_plain_narrow(leaf) and leaf.dim() > 0 for leaf in leaves):
        return {}
    return {key: each for key, each in rounded.items() if is_fp32_in_memory(each.param)}


def _is_wide(leaf: Any, *, scalars: bool) -> bool:
    # A tensor without dimensions does not widen the others, unless the operation may write to it.
    dtype = leaf.dtype if isinstance(leaf, torch.Tensor) and (scalars or leaf.dim() > 0) else leaf
    return dtype in (torch.float32, torch.float64)


def is_narrow(leaf: Any) -> bool:
    """Return whether an argument is a 16-bit tensor."""
    return isinstance(leaf, torch.Tensor) and is_rounded(leaf.dtype)


def _is_plain_narrow(leaf: Any) -> bool:
    return is_narrow(leaf) and not isinstance(leaf, StandIn)


def may_be_widened(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Return whether a function changes no argument, and one of its arguments is a 16-bit stand-in."""
    changes = name_of(func).endswith("_")
    return not changes and any(isinstance(leaf, StandIn) and is_narrow(leaf) for leaf in tree_leaves(args))


def _opened(
    tensors: Sequence[StandIn],
    changed: Sequence[StandIn],
    in_fp32: Mapping[int, StandIn],
    opened: ExitStack,
    *,
    puts_back: bool,
) -> dict[int, torch.Tensor]:
    """Return the elements of each tensor by its id. They are valid until the stack is closed, which writes changes.

    Args:
        tensors: The tensors.
        changed: The tensors that the operation changes.
        in_fp32: The tensors, by id, that it gets in fp32.
        opened: The stack.
        puts_back: Whether the operation has plain 16-bit arguments. These may be values read earlier; writing them back
            must not replace the unrounded values.
    """
    own = [tensor for tensor in tensors if not tensor.is_gradient and tensor.kept is None]
    params = dict.fromkeys(tensor.param for tensor in own)
    written = dict.fromkeys(tensor.param for tensor in changed if not tensor.is_gradient and tensor.kept is None)
    opened.enter_context(gathered(list(params), list(written)))
    for param in dict.fromkeys(tensor.param for tensor in changed if not tensor.is_data):
        if param in written and not param.is_inference():
            torch.autograd.graph.increment_version(param)  # graphs that saved it detect the change
    precise = dict.fromkeys(tensor.param for tensor in own if id(tensor) in in_fp32)
    values = {param: opened.enter_context(_unrounded(param, param in written, puts_back)) for param in precise}
    written = dict.fromkeys(tensor.param for tensor in changed if tensor.is_gradient)
    of_gradients = dict.fromkeys(tensor.param for tensor in tensors if tensor.is_gradient)
    if of_gradients and dist.get_world_size() > 1:
        agree_to_gather([param.ds_id for param in of_gradients], partial(describe, list(of_gradients), sys._getframe()))
    gradients = {param: opened.enter_context(_whole_gradient(param, param in written)) for param in of_gradients}

    def elements(tensor: StandIn) -> torch.Tensor:
        if tensor.kept is not None:
            return tensor.kept if id(tensor) in in_fp32 else tensor.kept.to(tensor.dtype)
        if tensor.is_gradient:
            return replayed(gradients[tensor.param], tensor)
        return replayed(values[tensor.param] if id(tensor) in in_fp32 else whole_data(tensor.param), tensor)

    return {id(tensor): elements(tensor) for tensor in tensors}


@contextmanager
def _unrounded(param: ZeroParameter, written: bool, puts_back: bool) -> Iterator[torch.Tensor]:
    # A read within backward must not wait for an update, and may read any parameter.
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
    training = training_of(param)
    gradient = training.full_gradient(param)
    if gradient is None:
        raise UnsupportedError(
            f"The gradient of a parameter of shape {tuple(param.ds_shape)} is gone: a step has used it, or zero_grad() "
            "was called.",
            "Read it between backward and step, and clone() values that are needed later.",
        )
    gradient = gradient.reshape(param.ds_shape).div_(training.loss_scale)
    yield gradient
    if written:
        training.set_gradient(param, gradient.mul_(training.loss_scale))


def _changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[StandIn]:
    """Return the tensors that an operation changes."""
    if not func._schema.is_mutable:
        return []
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    mutable = [named.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(mutable) if isinstance(leaf, StandIn)]


def replayed(result: Any, tensor: StandIn) -> torch.Tensor:
    """Return the view of a whole parameter that a tensor stands for.

    Args:
        result: The parameter's (or gradient's) elements, in its shape.
        tensor: The tensor.
    """
    for func, rest, kwargs, index in tensor.views:
        result = func(result, *rest, **kwargs)
        if index is not None:
            result = result[index]
    return result  # type: ignore[no-any-return]


def one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operation over lists element by element, so that only one parameter is gathered at a time."""
    lists = [each.name for each in func._schema.arguments if "List" in str(each.type) or "[]" in str(each.type)]
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | kwargs
    lists = [name for name in lists if isinstance(named.get(name), (list, tuple))]
    results = []
    for index in range(len(named[lists[0]])):
        one = {name: [value[index]] if name in lists else value for name, value in named.items()}
        results.append(computed(func, (), one))
    return None if all(result is None for result in results) else [each for result in results for each in result]


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a torch function."""
    return str(getattr(func, "__name__", func))
