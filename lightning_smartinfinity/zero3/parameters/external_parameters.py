"""Handles modules that begin to use another module's parameter after ZeRO-3 has recorded the order of gathers.

From then on ZeRO-3 gathers the parameter with the module whose forward reads it, too. Its prefetching follows the order
of an earlier step, which lacks that gather, and would raise a tracing error.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_smartinfinity.zero3.untyped import ZeroModule, ZeroOffload

__all__ = ["retrace_for_external_parameters"]


def retrace_for_external_parameters(offload: ZeroOffload) -> None:
    """Make ZeRO-3 record its order anew when a module has begun to use further parameters.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose module hooks gather.
    """
    num_known: dict[int, int] = {}

    def learning(gather: Callable[[ZeroModule], None]) -> Callable[[ZeroModule], None]:
        def gathering(sub_module: ZeroModule) -> None:
            num_external = len(getattr(sub_module, "_external_params", ()))
            coordinator = offload.get_param_coordinator()
            if num_external > num_known.get(sub_module.ds_id, 0):
                num_known[sub_module.ds_id] = num_external
                if coordinator.is_complete_trace():
                    coordinator._invalidate_trace()
            gather(sub_module)

        return gathering

    for name in ("pre_sub_module_forward_function", "pre_sub_module_backward_function"):
        setattr(offload, name, learning(getattr(offload, name)))
