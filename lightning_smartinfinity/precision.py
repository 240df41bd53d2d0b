"""Precision plugins of the smart_infinity strategies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.fabric.plugins.precision import DeepSpeedPrecision as FabricDeepSpeedPrecision
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.nn import Module
from typing_extensions import override

from lightning_smartinfinity.checks import check, one_of
from lightning_smartinfinity.errors import UnsupportedError

__all__ = ["SmartInfinityFabricPrecision", "SmartInfinityPrecision"]

_PrecisionName = Literal["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]


class SmartInfinityPrecision(DeepSpeedPrecision):
    """Precision of models trained by :class:`~lightning_smartinfinity.SmartInfinityStrategy`.

    It supports ``32-true``, ``bf16-true``, ``bf16-mixed``, ``16-true`` and ``16-mixed``. In every 16-bit precision the
    parameters have 16 bits, and the fp32 master weights, which start from them, lie on storage. The mixed precisions
    build the model in fp32 and cast it when ZeRO-3 takes it over; the true ones build it in 16 bits. fp16 scales the
    loss.

    ``Trainer(precision=...)`` is checked by Lightning's own plugin first, whose message for another precision names
    ``strategy='deepspeed'``.

    Args:
        precision: One of these names.

    Raises:
        ConfigError: The name is unknown.
    """

    def __init__(self, precision: _PrecisionName) -> None:
        check(type(self).__name__, "precision", precision, one_of(*get_args(_PrecisionName)))
        super().__init__(precision)
        self._step_follows = False

    @override
    def convert_module(self, module: Module) -> Module:
        _refuse_complex(module, self.precision)
        _set_dtype(module, self._desired_dtype, casts="true" in self.precision)
        return super().convert_module(module)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        optimizer.engine.optimizer.clip_grad = 0.0
        # DeepSpeedPrecision's own version refuses a training_step that returns None. Without backward, parameters have
        # no gradients, and the step changes nothing.
        result = closure()
        self._after_closure(model, optimizer)
        model.trainer.model.step(**kwargs)
        return result

    @override
    def _clip_gradients(self, *args: Any, **kwargs: Any) -> None:
        # Lightning calls this in automatic optimization only, when nothing but the step follows.
        self._step_follows = True
        try:
            super()._clip_gradients(*args, **kwargs)
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
        from lightning_smartinfinity.zero3.clipping import clip_norm, clip_values

        if clip_val <= 0:
            return
        optimizer = optimizer.engine.optimizer
        if gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            clip_values(optimizer, float(clip_val))
        elif self._step_follows:
            # The step scales the gradients anyway and knows their norm.
            optimizer.clip_grad = float(clip_val)
        else:
            clip_norm(optimizer, float(clip_val))


class SmartInfinityFabricPrecision(FabricDeepSpeedPrecision):
    """:class:`SmartInfinityPrecision` for Fabric, where ``Fabric(precision=...)`` chooses it by name.

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
        _refuse_complex(module, self.precision)
        _set_dtype(module, self._desired_dtype, casts="true" in self.precision)
        return super().convert_module(module)


def _set_dtype(module: Module, dtype: torch.dtype, *, casts: bool) -> None:
    """Tell Lightning's modules the dtype that their parameters have in the training.

    Args:
        module: The module.
        dtype: That dtype.
        casts: Whether parameters get it now. A mixed precision leaves that to DeepSpeed.
    """
    from lightning_smartinfinity.zero3.parameters.partitioning import cast_parameters

    _update_properties(module, dtype=dtype)
    if casts:
        cast_parameters(module.parameters(), dtype)


def _refuse_complex(module: Module, precision: str) -> None:
    # Casting a complex tensor to a real dtype silently drops its imaginary part.
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.is_complex():
            raise UnsupportedError(
                f"{type(module).__name__} has a complex tensor {name!r}, lost by precision={precision!r}.",
                "Store its real and imaginary parts (torch.view_as_real).",
            )
