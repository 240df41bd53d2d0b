"""Refuses to save, pickle or copy parameters that ZeRO-3 has partitioned: their tensors are empty.

Without it ``module.save_pretrained``, ``torch.save(module.state_dict())`` and ``copy.deepcopy(module)`` would lose the
model and say nothing. A parameter that is whole, within ``deepspeed.zero.GatheredParameters`` for example, is saved and
copied as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, is_zero_param
from torch import Tensor
from torch._guards import TracingContext

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["PartitionedEntry", "guard_copies", "unguarded"]

_T = TypeVar("_T", bound=Tensor)
_GUARDED: WeakSet[torch.nn.Module] = WeakSet()
_UNGUARDED: ContextVar[bool] = ContextVar("_UNGUARDED", default=False)
# Methods that return a copy or a view of a parameter for use elsewhere.
_COPIES = ("detach", "clone", "to", "cpu", "float", "half", "bfloat16", "double")
# Methods that return the elements in another form.
_READS = ("tolist", "numpy", "__array__", "__dlpack__")


def guard_copies(modules: Iterable[torch.nn.Module]) -> None:
    """Make saving, pickling and copying of these modules' own parameters raise while they are partitioned.

    Args:
        modules: Modules without their children. Parameters that ZeRO-3 has not taken over stay as they are.
    """
    for part in modules:
        if part not in _GUARDED:
            part.register_state_dict_post_hook(_mark_partitioned)  # type: ignore[no-untyped-call]
            _GUARDED.add(part)
        for param in part.parameters(recurse=False):
            if is_zero_param(param):
                _guard(param)


@contextmanager
def unguarded() -> Iterator[None]:
    """Suspend all guards in this context, for code that gathers on use or knows what ZeRO-3's empty tensors are."""
    token = _UNGUARDED.set(True)
    try:
        yield
    finally:
        _UNGUARDED.reset(token)


def _guard(param: ZeroParameter) -> None:
    # copy and pickle look these up on the instance. The pickler of multiprocessing reads the storage instead.
    param.__deepcopy__ = MethodType(_deepcopy, param)
    param.__reduce_ex__ = MethodType(_reduce_ex, param)
    param.untyped_storage = MethodType(_untyped_storage, param)
    for name in _COPIES:
        setattr(param, name, MethodType(_copying(name), param))
    for name in _READS:
        setattr(param, name, MethodType(_reading(name), param))


def _deepcopy(param: ZeroParameter, memo: dict[int, object]) -> object:
    _require_whole(param)
    return type(param).__deepcopy__(param, memo)


def _reduce_ex(param: ZeroParameter, protocol: int) -> object:
    _require_whole(param)
    own: ZeroParameter = type(param)
    return own.__reduce_ex__(param, protocol)


def _untyped_storage(param: ZeroParameter) -> object:
    if TracingContext.try_get() is None:  # torch.compile looks at storages, but copies nothing
        _require_whole(param)
    return type(param).untyped_storage(param)


def _copying(name: str) -> Callable[..., object]:
    """Return a method that returns a guarded entry where torch's own would return an empty tensor."""

    def method(param: ZeroParameter, *args: object, **kwargs: object) -> object:
        result = getattr(type(param), name)(param, *args, **kwargs)
        # Code that gathers on use has gathered it by now.
        if _UNGUARDED.get() or not _is_empty(param) or TracingContext.try_get() is not None:
            return result
        return PartitionedEntry.of(result, _in_words(param)) if isinstance(result, Tensor) else result

    return method


def _reading(name: str) -> Callable[..., object]:
    """Return a method that raises where torch's own would return no elements."""

    def method(param: ZeroParameter, *args: object, **kwargs: object) -> object:
        _require_whole(param)
        return getattr(type(param), name)(param, *args, **kwargs)

    return method


def _in_words(param: ZeroParameter) -> str:
    return f"A parameter of shape {tuple(param.ds_shape)}"


def _require_whole(param: ZeroParameter) -> None:
    if _is_empty(param) and not _UNGUARDED.get():
        _refuse(_in_words(param))


def _is_empty(param: ZeroParameter) -> bool:
    return param.ds_status is not ZeroParamStatus.AVAILABLE and param.ds_numel > 0


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(
        f"{what} cannot be saved, pickled or copied here: ZeRO-3 has partitioned it, and its own tensor is empty.",
        "Write the model by save_pretrained(folder), a method of the strategy and of SmartInfinityTraining, or a "
        "checkpoint's by `smart-infinity export`. Code that needs whole parameters in memory runs within "
        "deepspeed.zero.GatheredParameters(list(module.parameters())), on every rank.",
    )


def _mark_partitioned(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, _: object) -> None:
    """Replace the module's own partitioned parameters in its state dict; a hook of torch's."""
    if _UNGUARDED.get():
        return
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        entry = state_dict.get(prefix + name)
        if is_zero_param(param) and _is_empty(param) and isinstance(entry, Tensor) and entry is not param:
            state_dict[prefix + name] = PartitionedEntry.of(entry, f"Parameter {prefix + name!r}")


class PartitionedEntry(Tensor):
    """The empty tensor of a partitioned parameter in a state dict, which nothing can save, pickle or copy to memory.

    Shape, dtype and device are those of the empty tensor. What torch computes from it, such as ``detach()`` or
    ``cpu()``, is such an entry again.

    Attributes:
        what: The parameter, in words.
    """

    what: str = "A parameter"

    @staticmethod
    def of(tensor: Tensor, what: str) -> PartitionedEntry:
        """Return such an entry in place of a tensor.

        Args:
            tensor: The empty tensor.
            what: The parameter, in words.
        """
        with torch._C.DisableTorchFunctionSubclass():  # it may be such an entry already
            entry = tensor.detach().as_subclass(PartitionedEntry)
        entry.what = what
        return entry

    def as_subclass(self, cls: type[_T]) -> _T:  # torch asks no __torch_function__ about it
        """Return such an entry of a subclass; any other class would end the guard."""
        if not issubclass(cls, PartitionedEntry):
            _refuse(self.what)
        return super().as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        source = next((arg for arg in args if isinstance(arg, cls)), None)
        if func in _USES_OF_MEMORY:
            _refuse(cls.what if source is None else source.what)
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and source is not None:
            result.what = source.what
        return result


# What torch.save, pickle, copy, safetensors, numpy, DLPack and multiprocessing call, and what would end the guard.
_USES_OF_MEMORY: frozenset[object] = frozenset(
    {
        Tensor.__reduce_ex__,
        Tensor.__deepcopy__,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.numpy,
        Tensor.tolist,
        Tensor.data_ptr,
        Tensor.storage,
        Tensor.untyped_storage,
        Tensor.share_memory_,
    }
)
