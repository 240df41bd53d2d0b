"""Parameters that a module uses late: of other modules, for the first time after ZeRO-3 has learnt what comes when.

A parameter that another module's forward reads is from then on gathered with that module, too. ZeRO-3's prefetching
knows the order of one step, without it, and would raise a tracing error.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_smartinfinity.zero3.untyped import ZeroModule, ZeroOffload

__all__ = ["retrace_for_external_parameters"]


def retrace_for_external_parameters(offload: ZeroOffload) -> None:
    """Let ZeRO-3 learn its order anew when a module has come to use further parameters.

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
