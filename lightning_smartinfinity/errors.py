"""The errors that this package raises for users.

::

    SmartInfinityError
    ├── ConfigError            (ValueError)    a setting is unknown, contradictory or out of range
    ├── UnsupportedError       (ValueError)    a feature that this strategy does not support
    ├── StorageError           (RuntimeError)  a storage folder, file or device failed
    │   ├── StorageFullError                   too little free space, or the disk ran full
    │   ├── StorageLockedError                 another job owns the folder
    │   ├── StorageTimeoutError                a disk did not answer in time
    │   └── StorageCorruptError                a wrong checksum, a foreign extent, a newer format
    ├── DeviceError            (RuntimeError)  a SmartSSD, its runtime or its xclbin failed
    ├── CudaError              (RuntimeError)  the CUDA driver refused a call, or a copy failed
    ├── RankLostError          (RuntimeError)  another rank was killed, does not answer or failed
    │   └── RanksDivergedError                 ranks wait for each other at different places
    └── CheckpointError        (RuntimeError)  a checkpoint does not fit this model or is damaged
        └── CheckpointNotFoundError            (also a FileNotFoundError) there is no checkpoint at a path

Every message states what failed, with the offending value, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "CudaError",
    "DeviceError",
    "RankLostError",
    "RanksDivergedError",
    "SmartInfinityError",
    "StorageCorruptError",
    "StorageError",
    "StorageFullError",
    "StorageLockedError",
    "StorageTimeoutError",
    "UnsupportedError",
]


class SmartInfinityError(Exception):
    """Base class of every error raised by this package.

    Args:
        problem: What is wrong, with the class or setting and the offending value.
        remedy: What the user can do about it.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem} {remedy}")
        self.problem = problem
        self.remedy = remedy

    def __reduce__(self) -> tuple[type[SmartInfinityError], tuple[str, str]]:
        # Exceptions cross process boundaries (torch.multiprocessing spawn); the default would pickle only one argument.
        return type(self), (self.problem, self.remedy)


class ConfigError(SmartInfinityError, ValueError):
    """A setting is unknown, contradictory or out of range."""


class UnsupportedError(SmartInfinityError, ValueError):
    """A feature that this strategy does not support."""


class StorageError(SmartInfinityError, RuntimeError):
    """A storage folder, file or device failed."""


class StorageFullError(StorageError):
    """Too little free space, or the disk ran full."""


class StorageLockedError(StorageError):
    """Another job owns the folder."""


class StorageTimeoutError(StorageError):
    """A disk did not answer in time."""

    REMEDY = (
        "Look for the disk in the kernel log, and resume from a checkpoint. If the disk is only slow, allow it more: "
        "TransferConfig(io_timeout=...)."
    )


class StorageCorruptError(StorageError):
    """A checksum mismatch, a foreign extent or a newer format."""


class DeviceError(SmartInfinityError, RuntimeError):
    """A SmartSSD, its runtime or its xclbin failed."""


class CudaError(SmartInfinityError, RuntimeError):
    """The CUDA driver refused a call, or a copy from or to a device failed."""

    REMEDY = "Check the device with nvidia-smi and the kernel log; if its memory was lost, resume from a checkpoint."


class RankLostError(SmartInfinityError, RuntimeError):
    """Another rank was killed, does not answer, failed or did not join in time."""


class RanksDivergedError(RankLostError):
    """The ranks wait for each other at different places, or one of them did not join in time."""


class CheckpointError(SmartInfinityError, RuntimeError):
    """A checkpoint does not fit this model or is damaged."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint at a path."""
