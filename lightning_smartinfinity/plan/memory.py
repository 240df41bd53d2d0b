"""Host memory that an update with this package holds, by purpose: what ``SmartInfinityStrategy.host_bytes`` reports."""

from __future__ import annotations

from dataclasses import replace

from lightning_smartinfinity.checks import FLAG, between, check, instance
from lightning_smartinfinity.config import HOST_TASKLET_BYTES
from lightning_smartinfinity.plan.gradients import ITEM_BYTES
from lightning_smartinfinity.plan.handler import Route
from lightning_smartinfinity.plan.hardware import MOST_DEVICES
from lightning_smartinfinity.plan.workload import Workload
from lightning_smartinfinity.store.extents import BLOCK_BYTES

__all__ = ["host_bytes"]

_HOST_BUFFERS_OF_CARDS = 2  # devices/smartssd/device.py: what the host does in place of a card goes through them
_FP32_BYTES = 4
_BEAT_BYTES = 64


def host_bytes(
    workload: Workload,
    *,
    arena_item_bytes: int,
    num_cards: int = 0,
    route: Route = Route.HOST,
    error_feedback: bool = True,
) -> dict[str, int]:
    """Of one process.

    Args:
        workload: Its step; gradients are compressed for cards only.
        arena_item_bytes: Per element of the gradients before they are compressed: 2 or 4.
        num_cards: That update; 0: the host does.
        route: Of gradients to cards.
        error_feedback: Compressed gradients have a residual.

    Raises:
        ConfigError: An argument is out of range.
    """
    check("host_bytes", "workload", workload, instance(Workload))
    check("host_bytes", "arena_item_bytes", arena_item_bytes, ITEM_BYTES)
    check("host_bytes", "num_cards", num_cards, between(0, MOST_DEVICES))
    check("host_bytes", "route", route, instance(Route))
    check("host_bytes", "error_feedback", error_feedback, FLAG)
    layout = workload.card_layout(num_cards) if num_cards else _few_tasklets(workload).host_layout(1)
    extent = max(extent.nbytes for extent in layout.extents.extents)
    gradients = workload.gradients
    if num_cards:
        staged = gradients.nbytes(layout.extents.tasklet_numel) if route is Route.STORAGE else 0
        of_card = BLOCK_BYTES + -(-int(staged) // BLOCK_BYTES) * BLOCK_BYTES
        ring = _HOST_BUFFERS_OF_CARDS * extent + num_cards * workload.num_buffers * of_card
    else:
        ring = workload.num_buffers * extent
    held = {"ring": ring, "gradient_arena": arena_item_bytes * workload.numel}
    if gradients.compressed:
        payloads = (int(gradients.nbytes(tasklet.numel)) for tasklet in layout.tasklets)
        held["payloads"] = sum(-(-nbytes // _BEAT_BYTES) * _BEAT_BYTES for nbytes in payloads)
        if error_feedback:
            held["residual"] = _FP32_BYTES * workload.numel
    return held


def _few_tasklets(workload: Workload) -> Workload:
    """As large as those of training on the host, where a simulated large model has larger ones."""
    nbytes = workload.tasklet_bytes or HOST_TASKLET_BYTES
    return replace(workload, tasklet_bytes=nbytes, numel=min(workload.numel, nbytes))
