"""Predicts the host memory of an update by purpose, as ``SmartInfinityStrategy.host_bytes`` reports it."""

from __future__ import annotations

from dataclasses import replace

from lightning_smartinfinity.pipeline.layout.partition_layout import PartitionLayout
from lightning_smartinfinity.planning.simulator.gradients import ITEM_BYTES, GradientForm
from lightning_smartinfinity.planning.simulator.handler import Route
from lightning_smartinfinity.planning.simulator.hardware import MOST_DEVICES
from lightning_smartinfinity.planning.simulator.workload import Workload
from lightning_smartinfinity.settings import HOST_TASKLET_BYTES
from lightning_smartinfinity.settings.rules import FLAG, between, check, instance
from lightning_smartinfinity.storage.extents import BLOCK_BYTES

__all__ = ["compressed_bytes", "host_bytes"]

_HOST_BUFFERS_OF_CARDS = 2  # as in devices/smartssd/device.py: host buffers for work that no card does
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
    """Return the host memory of one process, in bytes by purpose.

    Args:
        workload: Data of the process's step; gradients are compressed for cards only.
        arena_item_bytes: Bytes per element of the gradients before they are compressed: 2 or 4.
        num_cards: Number of cards that update; 0 if the host updates.
        route: How gradients reach the cards.
        error_feedback: Whether compressed gradients have a residual.

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
        held |= compressed_bytes(gradients, layout, error_feedback=error_feedback)
    return held


def compressed_bytes(form: GradientForm, layout: PartitionLayout, *, error_feedback: bool) -> dict[str, int]:
    """Return one process's host memory for compressed gradients, without the arena, in bytes by purpose.

    Args:
        form: Form of the compressed gradients.
        layout: The process's partition.
        error_feedback: Whether compressed gradients have a residual.
    """
    payloads = (int(form.nbytes(tasklet.numel)) for tasklet in layout.tasklets)
    held = {"payloads": sum(-(-nbytes // _BEAT_BYTES) * _BEAT_BYTES for nbytes in payloads)}
    return {**held, "residual": _FP32_BYTES * layout.numel} if error_feedback else held


def _few_tasklets(workload: Workload) -> Workload:
    """Return a small workload with the tasklet size of training; simulations of large models use larger tasklets."""
    nbytes = workload.tasklet_bytes or HOST_TASKLET_BYTES
    return replace(workload, tasklet_bytes=nbytes, numel=min(workload.numel, nbytes))
