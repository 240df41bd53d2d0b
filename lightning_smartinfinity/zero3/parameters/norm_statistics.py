"""Keeps the running statistics of norms in fp32 while ZeRO-3 holds the norms' weights in 16 bits.

Lightning's mixed precisions keep both in fp32. In 16 bits statistics stop moving: with momentum 0.01 a step is smaller
than the distance to the next number. torch's kernels take a 16-bit input with fp32 weights and statistics, but not
weights and statistics of two dtypes, so the weights are cast for each forward of their module. What forward writes to
them is written to the parameters behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_smartinfinity.zero3.parameters.partitioned_tensor import PartitionedTensor

__all__ = ["keep_statistics", "keeps_statistics"]

_STATISTICS = ("running_mean", "running_var")


def keep_statistics(model: torch.nn.Module) -> None:
    """Let modules with running statistics compute in the dtype of these, and return the dtype of their input.

    These are torch's batch and instance norms, their subclasses, and the frozen batch norms of other libraries.
    ``release_module`` removes the hooks.

    Args:
        model: A model whose module hooks, which gather parameters, are in place.
    """
    for module in model.modules():
        if all(isinstance(module._buffers.get(name), torch.Tensor) for name in _STATISTICS):
            module.register_forward_pre_hook(_widen_weights)
            module.register_forward_hook(_narrow_output, always_call=True)


def keeps_statistics(hook: object) -> bool:
    """Return whether a module's hook is one of :func:`keep_statistics`."""
    return hook in (_widen_weights, _narrow_output)


class _Copy(torch.Tensor):
    """A copy of a parameter, which counts writes to its ``data``, too."""

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
    """Hide the norm's parameters by copies of the statistics' dtype, which its forward finds under their names."""
    dtype = norm.get_buffer(_STATISTICS[0]).dtype
    for name, param in norm._parameters.items():
        if param is not None and param.dtype != dtype:
            vars(norm)[name] = param.to(dtype).as_subclass(_Copy)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _narrow_output(norm: torch.nn.Module, inputs: Sequence[object], output: object) -> object:
    """Remove the copies. Frozen batch norms multiply by fp32 buffers, and the next module's weights have 16 bits."""
    for name, param in norm._parameters.items():
        copied = vars(norm).pop(name, None)
        if isinstance(copied, _Copy) and not copied.is_inference() and copied._version > 0:
            _write(param, copied.detach())
    first = inputs[0] if inputs else None
    if not (isinstance(first, torch.Tensor) and isinstance(output, torch.Tensor) and first.is_floating_point()):
        return None
    return output.to(first.dtype)


def _write(param: torch.nn.Parameter | None, values: torch.Tensor) -> None:
    """Write to a parameter's masters those of the values, of its shape, that are not its own, rounded."""
    data = PartitionedTensor.data_of(param)
    changed = values != data.clone()
    data[changed] = values[changed]
