"""Keeps parameters gathered for graphs that autograd will use again: ``retain_graph`` and ``create_graph``.

ZeRO-3 gathers a module's parameters when backward enters the module, and releases them when it leaves, once. A second
pass through the same graph, or a pass through the graph that the first one made, would find them empty.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_smartinfinity.zero3.untyped import ZeroOffload

__all__ = ["RetainedGraphs"]


class RetainedGraphs:
    """Keeps parameters gathered from the first backward that retains its graph to the end of the one that does not.

    Args:
        offload: DeepSpeed's ``DeepSpeedZeRoOffload``, whose module hooks gather and release.
    """

    def __init__(self, offload: ZeroOffload) -> None:
        self._offload = offload
        self._any_retained = False
        self._is_last_use = True
        self._in_engine = False
        offload.pre_sub_module_backward_function = self._noticing(offload.pre_sub_module_backward_function)
        self._release_leftovers = offload.release_backward_leftovers
        for name in (
            "post_sub_module_backward_function",
            "post_sub_module_forward_function",
            "release_backward_leftovers",
        ):
            setattr(offload, name, self._unless_retained(getattr(offload, name)))

    def backward_begins(self, *, retain_graph: bool) -> None:
        """Record that the engine's backward begins."""
        self._any_retained = self._any_retained or retain_graph
        self._is_last_use = not retain_graph
        self._in_engine = True

    def backward_ended(self) -> None:
        """Release what was kept when a backward ends, the engine's or the user's, unless its graph is used again."""
        self._in_engine = False
        if self._is_last_use:
            self.release()

    def release(self) -> None:
        """Release what was kept gathered."""
        if self._any_retained:
            self._any_retained = False
            self._offload.partition_all_parameters()
            self._release_leftovers()

    def _noticing(self, gather: Callable[[torch.nn.Module], None]) -> Callable[[torch.nn.Module], None]:
        def noticing(sub_module: torch.nn.Module) -> None:
            is_retained = _graph_is_retained()
            self._any_retained = self._any_retained or is_retained
            if not self._in_engine:
                # DeepSpeed takes torch.autograd.grad of what its engine returns for a backward, which ends.
                self._is_last_use = not is_retained
            gather(sub_module)

        return noticing

    def _unless_retained(self, release: Callable[..., None]) -> Callable[..., None]:
        def releasing(*sub_module: torch.nn.Module) -> None:
            if not self._any_retained:
                release(*sub_module)

        return releasing


def _graph_is_retained() -> bool:
    """Return whether the current backward pass keeps its graph; autograd tells it only within the pass."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())
