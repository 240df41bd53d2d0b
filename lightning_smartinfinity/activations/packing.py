"""Hooks that autograd calls when it saves a tensor, and when backward uses it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, cast

import torch
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from lightning_smartinfinity.activations.entries import Entry, Source
from lightning_smartinfinity.activations.forwards import Forward
from lightning_smartinfinity.activations.geometry import (
    Geometry,
    change_error,
    changes_of,
    geometry_of,
    shares_changes,
    stored_bytes,
)
from lightning_smartinfinity.activations.store import ActivationStore
from lightning_smartinfinity.errors import CudaError, StorageError

__all__ = ["Packing", "tensors_in"]

_graph_task = torch._C._current_graph_task_id
_NO_GRAPH_TASK = -1


class _SavedParameter:
    """Saved parameter, or view of one, whose data may have been replaced when backward uses it."""

    __slots__ = ("geometry", "parameter", "shape", "version")

    def __init__(self, parameter: Parameter, tensor: torch.Tensor) -> None:
        self.parameter, self.version = parameter, tensor._version
        self.shape = parameter.shape
        size, offset = tuple(tensor.shape), int(tensor.storage_offset() - parameter.storage_offset())
        self.geometry = Geometry(tensor.dtype, size, tensor.stride(), offset)


class _SavedTensor:
    """Saved tensor that views the bytes of an entry."""

    __slots__ = ("changes", "entry", "geometry", "version")

    def __init__(self, entry: Entry, tensor: torch.Tensor, *, changes: torch.Tensor) -> None:
        self.entry, self.geometry = entry, geometry_of(tensor)
        self.changes, self.version = changes, tensor._version


class Packing:
    """Hooks of one forward.

    Tensors that pass through are kept as autograd would keep them. Every saved tensor keeps its version, because
    autograd does not check for changes if there are hooks.

    Args:
        store: Store of the entries.
        forward: Record of the forward.
        min_bytes: Size of the smallest tensor that is offloaded.
        passing: Tensors whose storages are never offloaded. They must live as long as the forward.
        gather: Called to restore the data of a parameter that was released before backward uses it.
        notes_failures: Whether a tensor that cannot be read is replaced by NaN (zeros for integers), and the failure is
            noted in the store.

    Attributes:
        num_passed: Number of tensors that could not be moved, or were too small.
    """

    def __init__(
        self,
        store: ActivationStore,
        forward: Forward,
        *,
        min_bytes: int,
        passing: Iterable[torch.Tensor],
        gather: Callable[[Parameter], object] | None,
        notes_failures: bool,
    ) -> None:
        self._store, self._forward, self._min_bytes = store, forward, min_bytes
        self._gather, self._notes_failures = gather, notes_failures
        self._passing: dict[int, Parameter | None] = {}  # the only parameter of each storage, if there is one
        for tensor in passing:
            identity = _identity(tensor)
            if identity is not None:
                is_alone = identity not in self._passing
                self._passing[identity] = tensor if is_alone and isinstance(tensor, Parameter) else None
        self._sources: dict[int, Source] = {}  # by identity of the storage
        self._lock = store.lock
        self.num_passed = 0

    def pack(self, tensor: torch.Tensor) -> object:
        """Return the object that autograd keeps instead of a tensor."""
        base = tensor._base
        if _is_plain_parameter(tensor):
            return _SavedParameter(cast(Parameter, tensor), tensor)
        if base is not None and _is_plain_parameter(base) and _is_part(tensor, base):
            return _SavedParameter(cast(Parameter, base), tensor)
        if (
            type(tensor) is not torch.Tensor
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.nbytes < self._min_bytes
            or _graph_task() != _NO_GRAPH_TASK
            or not self._can_move(tensor)
        ):
            self.num_passed += 1
            return _passed(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._passing:
            parameter = self._passing[storage._cdata]
            if parameter is None or parameter.dtype != tensor.dtype or not shares_changes(parameter, tensor):
                return _passed(tensor)
            return _SavedParameter(parameter, tensor)  # an alias would keep the memory of a released parameter
        with self._lock:
            self._store.files.require_usable()
            saved = self._saved(tensor, storage)
        return _passed(tensor) if saved is None else saved

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor for which autograd keeps ``packed``.

        Raises:
            RuntimeError: The tensor was changed in place.
            CudaError: The tensor cannot be copied onto its device.
            StorageError: The tensor cannot be read.
        """
        if type(packed) is tuple:
            tensor, version = packed
            if tensor._version != version:
                raise change_error(tensor, tensor, version)
            return tensor  # type: ignore[no-any-return]
        if isinstance(packed, _SavedParameter):
            return self._parameter(packed)
        assert isinstance(packed, _SavedTensor)
        if packed.changes._version != packed.version:
            raise change_error(packed.geometry, packed.changes, packed.version)
        with self._lock:
            return self._tensor(packed)

    def timed_pack(self, tensor: torch.Tensor) -> object:
        """Call :meth:`pack`, and add its time to the forward's record."""
        began = time.perf_counter()
        packed = self.pack(tensor)
        self._forward.hook_seconds += time.perf_counter() - began
        return packed

    def timed_unpack(self, packed: Any) -> torch.Tensor:
        """Call :meth:`unpack`, and add its time to the forward's record."""
        began = time.perf_counter()
        tensor = self.unpack(packed)
        self._forward.hook_seconds += time.perf_counter() - began
        return tensor

    def _can_move(self, tensor: torch.Tensor) -> bool:
        return (
            not self._store.writes.stopped
            and (tensor.device.type == "cpu" or self._can_evict_from(tensor.device))
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not tensor._is_zerotensor()  # forward-mode differentiation has zeros without memory
            and _identity(tensor) is not None
        )

    def _can_evict_from(self, device: torch.device) -> bool:
        # A captured graph runs later, without these hooks.
        if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        with self._lock:
            return self._store.devices.copies_of(device) is not None

    def _saved(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> _SavedTensor | None:
        source = self._sources.get(storage._cdata)
        if source is not None and not source.is_of(storage):
            source = None
        entry = None if source is None else source.entry_for(tensor)
        if entry is not None:
            self._store.share(entry, tensor)
            return _SavedTensor(entry, tensor, changes=changes_of(tensor))
        if stored_bytes(tensor) < self._min_bytes:
            return None
        if source is None:
            source = self._sources[storage._cdata] = Source(storage)
        copies = None if tensor.device.type == "cpu" else self._store.devices.copies_of(tensor.device)
        changes = changes_of(tensor)
        entry = source.new_entry(tensor, storage, changes=changes, copies=copies)
        saved = _SavedTensor(entry, tensor, changes=changes)
        self._store.admit(entry, tensor, self._forward)
        return saved

    def _tensor(self, saved: _SavedTensor) -> torch.Tensor:
        self._store.files.require_usable()
        entry = saved.entry
        if entry.unreadable is None:
            try:
                # If backward changes it in place, the next unpacking raises, as in autograd.
                tensor = saved.changes.detach()
                tensor.data = self._store.fetch(entry, saved.geometry)
                return tensor
            except (StorageError, CudaError) as error:
                if not self._notes_failures:
                    raise
                entry.unreadable = type(error)(error.problem, error.remedy)  # a traceback would keep the entry alive
        self._store.files.note_unreadable(entry.unreadable)
        return _lost(saved.geometry, saved.changes.device)

    def _parameter(self, saved: _SavedParameter) -> torch.Tensor:
        parameter = saved.parameter
        if parameter._version != saved.version:
            raise change_error(saved.geometry, parameter, saved.version)
        if parameter.shape != saved.shape or (parameter.numel() > 1 and not any(parameter.stride())):
            if self._gather is None:
                raise StorageError(
                    f"A parameter of shape {tuple(saved.shape)} was released between forward and backward.",
                    "Pass gather=..., which brings the data of a parameter back.",
                )
            self._gather(parameter)
        data = parameter.data
        size, stride, offset = saved.geometry[1:]
        if (size, stride, offset) == (tuple(data.shape), data.stride(), 0):
            return data
        return data.as_strided(size, stride, data.storage_offset() + offset)


def tensors_in(values: object) -> list[torch.Tensor]:
    """Return the tensors in nested containers, also in mappings of other types (transformers') and in dataclasses."""
    found: list[torch.Tensor] = []
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, Mapping):
            found += tensors_in(list(value.values()))
        elif is_dataclass(value) and not isinstance(value, type):
            found += tensors_in([getattr(value, each.name, None) for each in fields(value)])
    return found


def _passed(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    # An output of the node that saves it would keep that node alive, which keeps the output alive.
    return (tensor if tensor.grad_fn is None else tensor.detach()), tensor._version


def _identity(tensor: torch.Tensor) -> int | None:
    """Return the identity of a tensor's storage; None for tensors without, such as sparse ones and torch.func's."""
    try:
        identity: int = tensor.untyped_storage()._cdata
        return identity
    except (NotImplementedError, RuntimeError):
        return None


def _is_plain_parameter(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter that torch handles as usual; subclasses may change that."""
    return issubclass(type(tensor), Parameter) and type(tensor).__torch_function__ is Parameter.__torch_function__


def _is_part(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether a view of a parameter has the same elements as the parameter's current memory.

    The parameter may have got other memory since the view was made.
    """
    if tensor.dtype != parameter.dtype or tensor.is_conj() != parameter.is_conj() or tensor.is_neg():
        return False
    identity = _identity(tensor)
    return identity is not None and identity == _identity(parameter)


def _lost(geometry: Geometry, device: torch.device) -> torch.Tensor:
    """Return a tensor of NaN (zeros if the dtype has no NaN) instead of one that cannot be read."""
    dtype, size, stride, _ = geometry
    least = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return least.fill_(float("nan") if dtype.is_floating_point or dtype.is_complex else 0)
