"""Gets and sets ``param.grad`` of ZeRO-3's parameters, whose gradients are moved to the optimizer."""

from __future__ import annotations

import sys
import warnings

import torch

from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.zero3.parameters.partitioned_tensor import PartitionedTensor
from lightning_smartinfinity.zero3.parameters.status import training_of
from lightning_smartinfinity.zero3.untyped import ZeroParameter

__all__ = ["GET_GRAD", "SET_GRAD", "gradient_of", "set_gradient"]

GET_GRAD, SET_GRAD = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""Torch's own getter and setter of ``tensor.grad``."""

_MOVING = torch.nn.Module._apply.__code__


def gradient_of(param: ZeroParameter) -> torch.Tensor | None:
    """Return ``param.grad`` as for training in memory; between backward and step, the gradient reduced over ranks.

    ``Module.to`` and its like get None, because a gradient outside the parameter does not move with it. They would
    gather it, which is collective. After an error on one rank, only that rank moves its module.
    """
    own: torch.Tensor | None = GET_GRAD(param)
    if own is not None:
        return own
    training = training_of(param)
    # Frame 1 is the property `grad`, and frame 2 its caller.
    if training is None or sys._getframe(2).f_code is _MOVING:
        return None
    if training.has_reduced_gradient(param):
        return PartitionedTensor.gradient(param)
    training.gradient_is_reset(param)
    by_torch = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")  # such as Module.zero_grad
    if not by_torch and training.has_used_gradient(param):
        warnings.warn(
            "The gradient of a parameter was read after the step that used it, and is None: read gradients between "
            "backward and step, such as in on_before_optimizer_step.",
            stacklevel=3,
        )
    return None


def set_gradient(param: ZeroParameter, value: torch.Tensor | None) -> None:
    """Do what ``param.grad = value`` does for training in memory: the next step uses the value, or no gradient.

    Raises:
        UnsupportedError: The value has another shape, or the parameter is not trained.
    """
    if isinstance(value, PartitionedTensor) and value.is_gradient and value.param is param and not value.views:
        return
    training = training_of(param)
    if value is not None and value.shape != torch.Size(param.ds_shape):
        raise UnsupportedError(
            f"A parameter of shape {tuple(param.ds_shape)} was given a gradient of shape {tuple(value.shape)}.",
            "Assign a gradient of the parameter's shape.",
        )
    if value is None:
        SET_GRAD(param, None)
        if training is not None:
            training.gradient_is_reset(param)
            if training.has_reduced_gradient(param):
                training.drop_gradient(param)
    elif training is None or not training.takes_gradient(param):
        raise UnsupportedError(
            f"A gradient was assigned to a parameter of shape {tuple(param.ds_shape)} that is not being trained.",
            "Assign gradients in a training, to parameters that were given to its optimizer.",
        )
    else:
        training.gradient_is_reset(param)
        training.set_gradient(param, value.detach() * training.loss_scale)
