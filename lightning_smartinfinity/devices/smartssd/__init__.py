"""Samsung SmartSSDs: optimizer state moves between an SSD and its accelerator, without passing the host."""

from lightning_smartinfinity.devices.smartssd.device import SmartSSDDevice
from lightning_smartinfinity.devices.smartssd.discovery.card_setup import CardSetup, find_cards
from lightning_smartinfinity.devices.smartssd.discovery.system import System
from lightning_smartinfinity.devices.smartssd.kernels import kernel_of
from lightning_smartinfinity.devices.smartssd.opening import require_memory
from lightning_smartinfinity.devices.smartssd.ring import CardRing, gradient_file_bytes, ring_within, share_of_memory
from lightning_smartinfinity.devices.smartssd.self_test import self_test

__all__ = [
    "CardSetup",
    "CardRing",
    "SmartSSDDevice",
    "System",
    "find_cards",
    "gradient_file_bytes",
    "kernel_of",
    "require_memory",
    "ring_within",
    "share_of_memory",
    "self_test",
]
