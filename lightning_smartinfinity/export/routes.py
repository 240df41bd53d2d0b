"""Routes the elements of a model's weights to the tensors of an export."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from lightning_smartinfinity.zero3.checkpoints.formats.weight_source import Contents, TensorSpec

__all__ = ["DTYPES", "ExportPlan", "Range", "plain_plan", "rounded", "router"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes of an export by their names in the command. Others would lose trained weights."""

Write = Callable[[str, int, torch.Tensor], None]
"""Writes elements of an exported tensor, given its name, the index of the first element, and values in its dtype."""


class Range(NamedTuple):
    """Consecutive elements of a tensor of the model, which become a whole tensor of the export.

    Args:
        origin: Name of the model's tensor.
        begin: Index of the first element in the flat tensor.
    """

    origin: str
    begin: int


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """Content of an export.

    Args:
        tensors: Shape and dtype of each tensor by its name in the export.
        ranges: Elements of a parameter or buffer from which each tensor is made, by its name in the export.
        others: Tensors that the source of the weights lacks.
    """

    tensors: Mapping[str, TensorSpec]
    ranges: Mapping[str, Range]
    others: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(spec.nbytes for spec in [*self.tensors.values(), *self.others.values()])


def rounded(spec: TensorSpec, dtype: torch.dtype | None) -> TensorSpec:
    """Return a tensor's shape and dtype in an export: trained floats get ``dtype`` unless it is None."""
    changes = dtype is not None and spec.trained and spec.dtype.is_floating_point
    return spec._replace(dtype=dtype) if changes and dtype is not None else spec


def plain_plan(contents: Contents, *, dtype: torch.dtype | None) -> ExportPlan:
    """Return the plan of an export that keeps all names, but contains each shared parameter only once."""
    buffers = {name: TensorSpec(value.shape, value.dtype) for name, value in contents.buffers.items()}
    tensors = {name: rounded(spec, dtype) for name, spec in {**contents.parameters, **buffers}.items()}
    return ExportPlan(tensors=tensors, ranges={name: Range(name, 0) for name in tensors})


def router(plan: ExportPlan, contents: Contents, write: Write, advance: Callable[[int], object]) -> Write:
    """Return a function that writes elements of the model's tensors to the tensors of the export.

    Args:
        plan: Content of the export.
        contents: The model's tensors.
        write: Writes elements of the export.
        advance: Called with the number of bytes after each write.
    """
    routes: dict[str, list[tuple[int, str, TensorSpec]]] = {}
    for name, (origin, begin) in plan.ranges.items():
        first = contents.aliases.get(origin, origin)
        routes.setdefault(first, []).append((begin, name, plan.tensors[name]))

    def put(origin: str, begin: int, values: torch.Tensor) -> None:
        for start, name, spec in routes.get(origin, ()):
            first, last = max(begin, start), min(begin + len(values), start + spec.numel)
            if first < last:
                part = values[first - begin : last - begin].to(spec.dtype)
                write(name, first - start, part)
                advance(part.nbytes)

    return put
