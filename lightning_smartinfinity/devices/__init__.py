"""Storage devices: places that hold optimizer state and can update it."""

from lightning_smartinfinity.devices.base import FolderTraffic, StorageDevice, Traffic
from lightning_smartinfinity.devices.host import HostDevice

__all__ = ["FolderTraffic", "HostDevice", "StorageDevice", "Traffic"]
