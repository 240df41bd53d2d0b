"""Layout of a card's memory and of the gradient file on its SSD: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup
from lightning_smartinfinity.errors import DeviceError
from lightning_smartinfinity.settings.smartssd import BUILD_REMEDY
from lightning_smartinfinity.storage.tensors.tensor_files import whole_blocks

__all__ = ["CardRing", "gradient_file_bytes", "ring_within", "share_of_memory"]

# The shell and XRT use some of a card's memory.
_USABLE_EIGHTHS = 7


@dataclass(frozen=True, kw_only=True)
class CardRing:
    """Buffers in a card's memory, each for one tasklet.

    Args:
        num_buffers: Number of buffers (``TransferConfig.num_buffers``); fewer if the card is shared.
        gradient_buffer_bytes: Bytes of the largest tasklet's gradient.
        parameter_bytes: Bytes of the largest tasklet's parameters.
    """

    num_buffers: int
    gradient_buffer_bytes: int
    parameter_bytes: int

    def parts(self, extent_bytes: int) -> tuple[int, int, int]:
        """Return the bytes of a buffer's parts, in whole blocks: state, gradient and parameters.

        Args:
            extent_bytes: Bytes of the largest extent. The page of its trailer holds the status of a run.
        """
        return whole_blocks(extent_bytes), whole_blocks(self.gradient_buffer_bytes), whole_blocks(self.parameter_bytes)

    def nbytes(self, extent_bytes: int) -> int:
        """Return the bytes of all buffers; ``extent_bytes`` is as in :meth:`parts`."""
        return self.num_buffers * sum(self.parts(extent_bytes))


def share_of_memory(setup: CardSetup) -> int | None:
    """Return the bytes of a card's memory that this process may use; ``None`` means all.

    Raises:
        DeviceError: The card is shared, and the xclbin does not state the size of its memory.
    """
    if setup.sharers == 1:
        return None
    if setup.xclbin.memory_bytes is None:
        raise DeviceError(
            f"{setup.sharers} processes share a card, and the xclbin {str(setup.xclbin.path)!r} does not specify how"
            " much memory it has.",
            f"Give each process cards of its own. Or: {BUILD_REMEDY}",
        )
    return setup.xclbin.memory_bytes * _USABLE_EIGHTHS // 8 // setup.sharers


def ring_within(setup: CardSetup, wanted: CardRing, *, extent_bytes: int) -> CardRing:
    """Reduce the ring to this process's share of the card, but to no fewer than two buffers.

    Two buffers may still exceed the share; :func:`require_memory` then raises.

    Args:
        setup: The setup, which states how many processes share a card.
        wanted: Ring to reduce.
        extent_bytes: Size of the largest extent, as for ``CardRing.parts``.

    Raises:
        DeviceError: The card is shared, and the xclbin does not state the size of its memory.
    """
    share = share_of_memory(setup)
    if share is None:
        return wanted
    most = share // sum(wanted.parts(extent_bytes))
    return replace(wanted, num_buffers=min(wanted.num_buffers, max(2, most)))


def gradient_file_bytes(setup: CardSetup, ring: CardRing) -> int:
    """Return the size of the gradient file on each card's SSD: one gradient for each buffer; 0 without such a file.

    Args:
        setup: The setup, which states the gradients' route.
        ring: The ring that :func:`ring_within` returned.
    """
    if setup.settings.gradient_route != "storage":
        return 0
    return ring.num_buffers * whole_blocks(ring.gradient_buffer_bytes)
