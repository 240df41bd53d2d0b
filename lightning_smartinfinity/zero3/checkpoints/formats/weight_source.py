"""The interface of sources of a model's weights, read window by window: checkpoints and trainings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from typing_extensions import override

from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import Put

__all__ = ["Contents", "SubmoduleWeights", "TensorSpec", "WeightSource", "persistent_buffers"]


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor.

    Args:
        shape: The tensor's shape.
        dtype: Its dtype; for a parameter, the dtype in which the model uses it.
        trained: Whether it is a trained parameter, which may have a master weight.
    """

    shape: torch.Size
    dtype: torch.dtype
    trained: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    @property
    def nbytes(self) -> int:
        """Size of the elements, in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Describes the weights of a model by name.

    Args:
        parameters: Every parameter, under one of its names.
        aliases: Further names of parameters, each mapped to the name in ``parameters``.
        buffers: Buffers that a state dict contains, in host memory.
        others: Names of state dict entries that are not tensors.
    """

    parameters: Mapping[str, TensorSpec]
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    others: Collection[str] = ()

    def specs(self) -> dict[str, TensorSpec]:
        """Return the tensors of a state dict: parameters under all of their names, and buffers."""
        aliases = {alias: self.parameters[name] for alias, name in self.aliases.items()}
        buffers = {name: TensorSpec(value.shape, value.dtype) for name, value in self.buffers.items()}
        return {**self.parameters, **aliases, **buffers}


class WeightSource(ABC):
    """A source of weights, which passes on the values of parameters window by window."""

    @property
    @abstractmethod
    def contents(self) -> Contents:
        """Names, shapes and dtypes."""

    @abstractmethod
    def read(self, names: Collection[str], put: Put, *, masters: bool) -> None:
        """Pass all elements of some parameters to ``put``, in windows of at most ``WINDOW_NUMEL`` elements.

        Args:
            names: Names in ``contents.parameters``.
            put: Function called with the values, in fp32 or in the parameter's dtype.
            masters: Whether to pass unrounded values of trained parameters.

        Raises:
            SmartInfinityError: The values could not be read, or ``put`` raised.
        """


class SubmoduleWeights(WeightSource):
    """The weights of a submodule, by the submodule's own names.

    Args:
        whole: The weights of the whole module.
        name: Name of the submodule; empty: the module itself.
    """

    def __init__(self, whole: WeightSource, name: str) -> None:
        self._whole = whole
        prefix = f"{name}." if name else ""
        start, contents = len(prefix), whole.contents
        names = {each: contents.aliases.get(each, each) for each in [*contents.parameters, *contents.aliases]}
        inside = {each[start:]: origin for each, origin in names.items() if each.startswith(prefix)}
        first_names: dict[str, str] = {}
        for each, origin in inside.items():
            first_names.setdefault(origin, each)
        self._first_names = first_names
        self._contents = Contents(
            parameters={each: contents.parameters[origin] for origin, each in first_names.items()},
            aliases={each: first_names[origin] for each, origin in inside.items() if first_names[origin] != each},
            buffers={each[start:]: value for each, value in contents.buffers.items() if each.startswith(prefix)},
            others=[each[start:] for each in contents.others if each.startswith(prefix)],
        )

    @property
    @override
    def contents(self) -> Contents:
        return self._contents

    @override
    def read(self, names: Collection[str], put: Put, *, masters: bool) -> None:
        def put_here(origin: str, begin: int, values: torch.Tensor) -> None:
            put(self._first_names[origin], begin, values)

        origins = {origin for origin, name in self._first_names.items() if name in names}
        self._whole.read(origins, put_here, masters=masters)


def persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that a checkpoint holds, by name."""
    # Not by state_dict(), which would process partitioned parameters.
    for prefix, child in module.named_modules():
        for name, value in child._buffers.items():
            if value is not None and name not in child._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, value
