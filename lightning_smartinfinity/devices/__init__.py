"""Storage devices: places that hold optimizer state and can update it."""

from lightning_smartinfinity.devices.base import StorageDevice, Traffic
from lightning_smartinfinity.devices.host import HostDevice

__all__ = ["HostDevice", "StorageDevice", "Traffic"]
