"""Precision plugins of the smart_infinity strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.precision import DeepSpeedPrecision as FabricDeepSpeedPrecision, Precision
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType, rank_zero_warn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities import apply_to_collection
from torch.nn import Module
from typing_extensions import override

from lightning_smartinfinity.common.patches import replaced, wrapped
from lightning_smartinfinity.errors import UnsupportedError
from lightning_smartinfinity.settings.rules import check, one_of

__all__ = ["SmartInfinityFabricPrecision", "SmartInfinityPrecision"]

_PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


class SmartInfinityPrecision(DeepSpeedPrecision):
    """Precision of models trained by :class:`~lightning_smartinfinity.SmartInfinityStrategy`.

    It supports ``32-true``, ``bf16-true``, ``bf16-mixed``, ``16-true`` and ``16-mixed``. In every 16-bit precision the
    parameters have 16 bits; the fp32 master weights, initialised from them, are kept on storage. The mixed precisions
    build the model in fp32 and cast it when ZeRO-3 partitions it; the true ones build it in 16 bits. fp16 scales the
    loss.

    Lightning's own plugin checks ``Trainer(precision=...)`` first. Its message for another precision names
    ``strategy='deepspeed'``.

    Args:
        precision: One of the names above.

    Raises:
        ConfigError: The name is unknown.
    """

    def __init__(self, precision: _PrecisionName) -> None:
        check(type(self).__name__, "precision", precision, one_of(*get_args(_PrecisionName)))
        super().__init__(precision)
        self._step_follows = False
        self._saw_a_batch = False

    @override
    def convert_module(self, module: Module) -> Module:
        with _converting(module, self.precision, self._desired_dtype):
            return super().convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        # Lightning's own 32-true does not cast batches; its own 16-bit true precisions do.
        if "true" in self.precision:
            return data if self._desired_dtype is torch.float else super().convert_input(data)
        if not self._saw_a_batch:
            self._saw_a_batch = True
            self._warn_of_rounding(data)
        return apply_to_collection(data, torch.Tensor, _in_16_bit, self._desired_dtype)

    def _warn_of_rounding(self, data: Any) -> None:
        changed: list[bool] = []
        apply_to_collection(data, torch.Tensor, lambda tensor: changed.append(_changes(tensor, self._desired_dtype)))
        if any(changed):
            rank_zero_warn(
                f"precision={self.precision!r} rounds the float tensors of batches to {self._desired_dtype}, which is "
                "the dtype of the parameters here; Lightning's own mixed precision leaves batches as they are. What "
                "needs more digits, such as targets or times, can be passed as integers or float64, which stay."
            )

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        # As in Lightning's own 16-bit true precisions, new tensors of a step have the parameters' dtype.
        with self.tensor_init_context():
            yield

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        optimizer.engine.optimizer.clip_grad = 0.0
        # DeepSpeedPrecision's own version refuses a training_step that returns None. Without a backward, parameters
        # have no gradients, and the step changes nothing.
        result = closure()
        self._after_closure(model, optimizer)
        model.trainer.model.step(**kwargs)
        return result

    @override
    def backward(  # type: ignore[override]
        self, tensor: torch.Tensor, model: pl.LightningModule, optimizer: Any, *args: Any, **kwargs: Any
    ) -> None:
        engine: Any = model.trainer.model
        if not is_overridden("backward", model):
            engine.backward(tensor, *args, **kwargs)
            return

        # DeepSpeedPrecision's own version never calls the module's overridden method.
        def backward(
            original: Callable[..., None],
            loss: torch.Tensor,
            gradient: torch.Tensor | None = None,
            retain_graph: bool | None = None,
            **others: Any,
        ) -> None:
            given = {name: value for name, value in others.items() if value not in (None, False)}
            with replaced(torch.Tensor, "backward", original):
                scaled = loss if gradient is None else (loss * gradient).sum()
                engine.backward(scaled, retain_graph=bool(retain_graph), **given)

        with wrapped(torch.Tensor, "backward", backward):
            model.backward(tensor, *args, **kwargs)

    @override
    def _clip_gradients(self, model: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning calls this only in automatic optimization. If the module overrides configure_gradient_clipping, that
        # method may read the clipped gradients before the step.
        self._step_follows = not is_overridden("configure_gradient_clipping", model)
        try:
            super()._clip_gradients(model, *args, **kwargs)
        finally:
            self._step_follows = False

    @override
    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # DeepSpeedPrecision's own version does nothing.
        from lightning_smartinfinity.zero3.optimizer.clipping import clip_norm, clip_values

        if clip_val <= 0:
            return
        optimizer = optimizer.engine.optimizer
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip_values(optimizer, float(clip_val))
        elif self._step_follows:
            # The step scales the gradients anyway and knows their norm, so it can clip in the same pass.
            optimizer.clip_grad = float(clip_val)
        else:
            clip_norm(optimizer, float(clip_val))


class SmartInfinityFabricPrecision(FabricDeepSpeedPrecision):
    """:class:`SmartInfinityPrecision` for Fabric. ``Fabric(precision=...)`` chooses it by name.

    Args:
        precision: One of the names of :class:`SmartInfinityPrecision`.

    Raises:
        ConfigError: The name is unknown.
    """

    def __init__(self, precision: _PrecisionName) -> None:
        check(type(self).__name__, "precision", precision, one_of(*get_args(_PrecisionName)))
        super().__init__(precision)

    @override
    def convert_module(self, module: Module) -> Module:
        with _converting(module, self.precision, self._desired_dtype):
            return super().convert_module(module)

    @override
    def convert_input(self, data: Any) -> Any:
        # Fabric's own 32-true casts neither inputs nor outputs, such as float64 tensors and 16-bit results of an
        # autocast.
        return data if self._desired_dtype is torch.float else super().convert_input(data)

    @override
    def convert_output(self, data: Any) -> Any:
        return data if self._desired_dtype is torch.float else super().convert_output(data)

    @override
    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor, model, *args, **kwargs)

    # If a precision overrides backward, Fabric makes torch.autograd.grad raise. Its check unwraps ours, and finds none.
    backward.__wrapped__ = Precision.backward  # type: ignore[attr-defined]


@contextmanager
def _converting(module: Module, precision: str, dtype: torch.dtype) -> Iterator[None]:
    """Prepare a module for ``module.to(dtype)``, which a true precision calls within this context.

    Sets the training's dtype as the dtype of Lightning modules. Casts parameters one by one in a true precision; in a
    mixed precision DeepSpeed casts them. Complex buffers keep their dtype, since torch would drop their imaginary
    parts. float64 buffers keep theirs in fp32, as in Lightning's own 32-true.

    Raises:
        UnsupportedError: The module has a complex parameter.
    """
    from lightning_smartinfinity.zero3.parameters.partitioning import cast_parameters

    for name, param in module.named_parameters():
        if param.is_complex():
            raise UnsupportedError(
                f"{type(module).__name__} has a complex parameter {name!r}, lost by precision={precision!r}.",
                "Store its real and imaginary parts (torch.view_as_real), or register it as a buffer if nothing "
                "trains it.",
            )
    _update_properties(module, dtype=dtype)
    if "true" in precision:
        cast_parameters(module.parameters(), dtype)
    kept = [
        (child._buffers, name, buffer)
        for child in module.modules()
        for name, buffer in child._buffers.items()
        if buffer is not None and (buffer.is_complex() or (buffer.dtype is torch.double and dtype is torch.float))
    ]
    for buffers, name, _ in kept:
        buffers[name] = None
    try:
        yield
    finally:
        for buffers, name, buffer in kept:
            buffers[name] = buffer


def _in_16_bit(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a batch's tensor cast as mixed precisions do. float64 stays, as with torch's autocast."""
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.double else tensor


def _changes(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether :func:`_in_16_bit` changes any value, NaNs aside."""
    return bool((_in_16_bit(tensor, dtype) != tensor)[~tensor.isnan()].any())
