"""What lies in a card's memory, and on its SSD beside the state: arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_smartinfinity.devices.smartssd.discovery import CardSetup
from lightning_smartinfinity.devices.smartssd.xclbin import BUILD_REMEDY
from lightning_smartinfinity.errors import DeviceError
from lightning_smartinfinity.store.extents import BLOCK_BYTES

__all__ = ["CardRing", "gradient_file_bytes", "ring_within", "share_of_memory"]

# The shell and XRT keep some of a card's memory for themselves.
_USABLE_EIGHTHS = 7


@dataclass(frozen=True, kw_only=True)
class CardRing:
    """Tasklets that are on a card at once.

    Args:
        num_buffers: How many (``TransferConfig.num_buffers``); fewer where the card is shared.
        gradient_bytes: Of the largest tasklet's gradient.
        parameter_bytes: Of its parameters.
    """

    num_buffers: int
    gradient_bytes: int
    parameter_bytes: int

    def parts(self, extent_bytes: int) -> tuple[int, int, int]:
        """Bytes of what one buffer consists of, in whole blocks: state, gradient and parameters.

        Args:
            extent_bytes: Of the largest tasklet's extent. Its trailer's page is not there, but a page of status is.
        """
        return _padded(extent_bytes), _padded(self.gradient_bytes), _padded(self.parameter_bytes)

    def nbytes(self, extent_bytes: int) -> int:
        """Of all buffers; ``extent_bytes`` as for :meth:`parts`."""
        return self.num_buffers * sum(self.parts(extent_bytes))


def share_of_memory(setup: CardSetup) -> int | None:
    """Bytes of a card's memory that this process may take; None: all that there is.

    Raises:
        DeviceError: It is shared, and the xclbin does not tell how much there is.
    """
    if setup.sharers == 1:
        return None
    if setup.xclbin.memory_bytes is None:
        raise DeviceError(
            f"{setup.sharers} processes share a card, and the xclbin {str(setup.xclbin.path)!r} does not tell how much"
            " memory it has.",
            f"Give each process cards of its own. Or: {BUILD_REMEDY}",
        )
    return setup.xclbin.memory_bytes * _USABLE_EIGHTHS // 8 // setup.sharers


def ring_within(setup: CardSetup, wanted: CardRing, *, extent_bytes: int) -> CardRing:
    """As many of the wanted buffers as fit into this process's share: two at least, which may then be refused.

    Args:
        setup: How many processes share a card.
        wanted: At most.
        extent_bytes: As for ``CardRing.parts``.

    Raises:
        DeviceError: As :func:`share_of_memory`.
    """
    share = share_of_memory(setup)
    if share is None:
        return wanted
    most = share // sum(wanted.parts(extent_bytes))
    return replace(wanted, num_buffers=min(wanted.num_buffers, max(2, most)))


def gradient_file_bytes(setup: CardSetup, ring: CardRing) -> int:
    """Of the file on each card's SSD that gradients go through: a place for each buffer; without such a route 0.

    Args:
        setup: The route.
        ring: Of :func:`ring_within`.
    """
    if setup.settings.gradient_route != "storage":
        return 0
    return ring.num_buffers * _padded(ring.gradient_bytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // BLOCK_BYTES) * BLOCK_BYTES
