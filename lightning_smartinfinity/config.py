"""Settings as frozen dataclasses, validated once at construction."""

from __future__ import annotations

import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_smartinfinity.errors import ConfigError
from lightning_smartinfinity.native import MAX_BUFFERS, MAX_THREADS

__all__ = [
    "CARD_TASKLET_BYTES",
    "HOST_TASKLET_BYTES",
    "MAX_CARD_NUMBER",
    "SmartSSDConfig",
    "TransferConfig",
    "require_one_of",
    "shown",
]

HOST_TASKLET_BYTES = 4 * 1024 * 1024
"""``TransferConfig(tasklet_bytes=None)`` where the host updates."""

CARD_TASKLET_BYTES = 64 * 1024 * 1024
"""The same where SmartSSDs do: the published card reads 1.6 GB/s at 1 MiB, 2.2 at 4 MiB, 2.4 at 128 MiB."""

MAX_CARD_NUMBER = 65_535
"""Of ``SmartSSDConfig(devices=...)``: more than any machine has."""


_MIN_TASKLET_BYTES = 64 * 1024
_IO_ENGINES = ("auto", "io_uring", "io_uring_sqpoll", "threads", "plain")
_DURABILITIES = ("none", "step", "power")
_DIRECT_IO = ("auto", "on", "off")
_GRADIENT_ROUTES = ("auto", "host", "storage")
_BINDINGS = ("auto", "native", "pyxrt")
_MAX_TIMEOUT = 2_147_483  # XRT counts milliseconds in an int


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """How optimizer state moves between storage and the update.

    Args:
        tasklet_bytes: Size of one ring buffer in bytes: the most state read or written at once. None: 4 MiB where the
            host updates, 64 MiB where SmartSSDs do.
        num_buffers: Number of ring buffers. ``num_buffers * tasklet_bytes`` bounds the ring, whatever the model's size.
            Beside it the update holds one gradient per parameter of the rank's partition; on a GPU slots for
            parameters (with Adam a sixth of the ring in 16 bit, a third in fp32); with parameters on storage a staging
            buffer as large as the ring; and what ``dram_cache_bytes`` keeps in memory.
        compute_threads: Threads that update, per rank. One keeps up with one disk as a rule; more help where
            arithmetic, not storage, takes the time, and take cores from forward and backward. No result depends on it.
        io_engine: ``"io_uring"`` (registered files and, where the limit on lockable memory allows it, buffers: least
            CPU time), ``"io_uring_sqpoll"`` (the same, with a kernel thread that polls for requests: it wants a core of
            its own), ``"threads"`` (pread and pwrite on a thread pool), ``"plain"`` (the same through the page cache,
            which is given back at once: for file systems without direct I/O) or ``"auto"`` (io_uring where the system
            allows it, else threads; plain for all folders if any of them has no direct I/O).
        dram_cache_bytes: Optimizer state that stays in host memory, in bytes per rank: whole tasklets, the first of the
            partition first. It is written to storage as well, so that only reads are saved; with ``durability="none"``
            and ``keep=False`` it is in memory only, and writes are saved too. ``"auto"``: what is free when training
            begins, less a quarter of the memory, shared by the ranks of a machine. No result depends on it.
        durability: ``"none"`` (one place for each tasklet: a failed step cannot be undone), ``"step"`` (two: a failed
            step is rolled back exactly, ``StateStore.recover`` can open the store after a kill) or ``"power"`` (after a
            power loss, too: flushes the device at every step). Training resumes from checkpoints, whichever it is.
        direct_io: ``"on"`` (O_DIRECT or an error), ``"off"`` (through the page cache) or ``"auto"`` (O_DIRECT where
            the file system has it, otherwise a warning).
        job: Name of this job's folder below each storage folder; two jobs on one storage need two names.
        keep: Keep the state on storage after the strategy is closed.

    Raises:
        ConfigError: A value is out of range or not one of those above.
    """

    tasklet_bytes: int | None = None
    num_buffers: int = 16
    compute_threads: int = 1
    io_engine: str = "auto"
    dram_cache_bytes: int | str = 0
    durability: str = "step"
    direct_io: str = "auto"
    job: str = "default"
    keep: bool = False

    def __post_init__(self) -> None:
        if self.tasklet_bytes is not None:
            _require_int("tasklet_bytes", self.tasklet_bytes, _MIN_TASKLET_BYTES)
        _require_int("num_buffers", self.num_buffers, 2, MAX_BUFFERS)
        _require_int("compute_threads", self.compute_threads, 1, MAX_THREADS)
        require_one_of("io_engine", self.io_engine, _IO_ENGINES)
        require_one_of("durability", self.durability, _DURABILITIES)
        require_one_of("direct_io", self.direct_io, _DIRECT_IO)
        if self.io_engine == "plain" and self.direct_io == "on":
            raise ConfigError(
                "TransferConfig(io_engine='plain', direct_io='on') contradicts itself: the plain engine is for files in"
                " the page cache.",
                "Use io_engine='auto', or direct_io='off'.",
            )
        _require_cache_bytes(self.dram_cache_bytes)
        if not isinstance(self.keep, bool):
            raise ConfigError(f"TransferConfig(keep={self.keep!r}) is not a bool.", "Pass True or False.")
        _require_folder_name("job", self.job)

    @property
    def file_access(self) -> str:
        """How files are opened, in the words of ``direct_io``: the plain engine wants them in the page cache."""
        return "off" if self.io_engine == "plain" else self.direct_io

    @property
    def num_slots(self) -> int:
        """Places a tasklet's state may lie on storage: 1 without durability, else 2."""
        return 1 if self.durability == "none" else 2

    @property
    def writes_through(self) -> bool:
        """Whether state that stays in host memory is written to storage as well."""
        return self.durability != "none" or self.keep


@dataclass(frozen=True, kw_only=True)
class SmartSSDConfig:
    """Samsung SmartSSDs whose accelerators update beside their storage.

    Args:
        xclbin: The kernels, built by ``make -C hls xclbin``. None: what the environment variable
            SMART_INFINITY_XCLBIN names.
        devices: The card of each storage folder, in their order: PCI addresses (``"0000:3d:00.1"``) or numbers among
            the system's cards, ordered by address. None: the card that shares its PCIe switch with the folder's SSD.
        gradient_route: How gradients reach a card: ``"host"`` (from host memory into its DRAM), ``"storage"`` (written
            to its SSD and read from there past the host, as published) or ``"auto"``, which is ``"host"``.
        timeout: Seconds after which a kernel, a transfer between card and SSD or between card and host that does not
            return is given up, and the host takes over: above 0, and at most 2147483.
        binding: How XRT is called: ``"native"`` (its C library, without the interpreter's lock), ``"pyxrt"`` (its
            Python module, which holds the lock) or ``"auto"``: pyxrt where it is there and the library is not.

    Raises:
        ConfigError: A value is out of range or not one of those above.
    """

    xclbin: str | Path | None = None
    devices: Sequence[str | int] | None = None
    gradient_route: str = "auto"
    timeout: float = 30.0
    binding: str = "auto"

    def __post_init__(self) -> None:
        if self.xclbin is not None and not _names_file(self.xclbin):
            raise ConfigError(f"SmartSSDConfig(xclbin={self.xclbin!r}) names no file.", "Pass the path of an xclbin.")
        object.__setattr__(self, "devices", _cards(self.devices))
        require_one_of("gradient_route", self.gradient_route, _GRADIENT_ROUTES, of="SmartSSDConfig")
        require_one_of("binding", self.binding, _BINDINGS, of="SmartSSDConfig")
        if not _is_number(self.timeout) or not 0 < self.timeout <= _MAX_TIMEOUT:  # a comparison with NaN is false
            raise ConfigError(
                f"SmartSSDConfig(timeout={shown(self.timeout)}) is out of range.",
                f"Pass seconds above 0 and up to {_MAX_TIMEOUT}.",
            )


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _names_file(value: object) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(str(value)) and "\0" not in str(value)


def _cards(devices: object) -> tuple[str | int, ...] | None:
    """Addresses and numbers, whichever kind of integer they were."""
    if devices is None:
        return None
    named = [_card(one) for one in devices] if isinstance(devices, (list, tuple)) else []
    cards = tuple(card for card in named if card is not None)
    if not cards or len(cards) != len(named):
        raise ConfigError(
            f"SmartSSDConfig(devices={shown(devices)}) names no cards.",
            "Pass a list with the PCI address of one card for each storage folder, or its number from 0 to"
            f" {MAX_CARD_NUMBER}.",
        )
    return cards


def _card(value: Any) -> str | int | None:
    """An address, or any integer, NumPy's among them; None: neither."""
    if isinstance(value, str):
        return value or None
    try:
        number = operator.index(value)
    except TypeError:
        return None
    return number if 0 <= number <= MAX_CARD_NUMBER and not isinstance(value, bool) else None


def shown(value: object) -> str:
    """For a message."""
    try:
        return repr(value)
    except ValueError:  # Python writes out no integers of many thousand digits
        return "<too many digits to show>"


def _require_int(name: str, value: object, minimum: int, maximum: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ConfigError(f"TransferConfig({name}={value!r}) is out of range.", f"Pass an int of at least {minimum}.")
    if maximum is not None and value > maximum:
        raise ConfigError(f"TransferConfig({name}={value!r}) is out of range.", f"Pass an int of at most {maximum}.")


def _require_cache_bytes(value: object) -> None:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ConfigError(
            f"TransferConfig(dram_cache_bytes={value!r}) is out of range.", "Pass an int of at least 0, or 'auto'."
        )


def require_one_of(name: str, value: object, choices: tuple[str, ...], *, of: str = "TransferConfig") -> None:
    """One of these words.

    Raises:
        ConfigError: It is another.
    """
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{of}({name}={value!r}) is unknown.", f"Use one of: {', '.join(choices)}.")


def _require_folder_name(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or value in (".", "..") or "/" in value or "\0" in value:
        raise ConfigError(
            f"TransferConfig({name}={value!r}) is not a folder name.", "Pass a plain name without slashes."
        )
