"""Keeps the running statistics of norms in fp32 while ZeRO-3 holds the norms' weights in 16 bit.

Lightning's mixed precisions keep both in fp32. In 16 bit, statistics stop changing: with momentum 0.01 a change is
smaller than the distance to the next number. torch's kernels accept a 16-bit input with fp32 weights and statistics,
but not weights and statistics of different dtypes. So the weights are cast for each forward of their module. If forward
writes to the cast weights, the writes are copied to the parameters afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_smartinfinity.zero3.parameters.partitioned_tensor import PartitionedTensor

__all__ = ["keep_statistics", "keeps_statistics"]

_STATISTICS = ("running_mean", "running_var")


def keep_statistics(model: torch.nn.Module) -> None:
    """Make modules with running statistics compute in the statistics' dtype, and return the dtype of their input.

    These modules are torch's batch and instance norms, their subclasses, and the frozen batch norms of other libraries.
    ``release_module`` removes the hooks.

    Args:
        model: A model whose module hooks, which gather parameters, are in place.
    """
    for module in model.modules():
        if all(isinstance(module._buffers.get(name), torch.Tensor) for name in _STATISTICS):
            module.register_forward_pre_hook(_widen_weights)
            module.register_forward_hook(_narrow_output, always_call=True)


def keeps_statistics(hook: object) -> bool:
    """Return whether a module's hook was registered by :func:`keep_statistics`."""
    return hook in (_widen_weights, _narrow_output)


class _Copy(torch.Tensor):
    """A copy of a parameter whose version also counts writes to its ``data``."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:
        """The copy outside of the graph."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.detach().copy_(value)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _widen_weights(norm: torch.nn.Module, inputs: object) -> None:
    """Shadow the norm's parameters with copies in the statistics' dtype, which its forward finds under their names."""
    dtype = norm.get_buffer(_STATISTICS[0]).dtype
    for name, param in norm._parameters.items():
        if param is not None and param.dtype != dtype:
            vars(norm)[name] = param.to(dtype).as_subclass(_Copy)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _narrow_output(norm: torch.nn.Module, inputs: Sequence[object], output: object) -> object:
    """Remove the copies, keep writes to them, and cast the output to the input's dtype.

    Frozen batch norms multiply by fp32 buffers, but the next module's weights are 16-bit.
    """
    for name, param in norm._parameters.items():
        copied = vars(norm).pop(name, None)
        # The version of a copy is above 0 only after a write. Tensors of inference mode have no version.
        if isinstance(copied, _Copy) and not copied.is_inference() and copied._version > 0:
            _write(param, copied.detach())
    first = inputs[0] if inputs else None
    if not (isinstance(first, torch.Tensor) and isinstance(output, torch.Tensor) and first.is_floating_point()):
        return None
    return output.to(first.dtype)


def _write(param: torch.nn.Parameter | None, values: torch.Tensor) -> None:
    """Write the values, of the parameter's shape, to the parameter and its masters where they differ from it."""
    data = PartitionedTensor.data_of(param)
    changed = values != data.clone()
    data[changed] = values[changed]
