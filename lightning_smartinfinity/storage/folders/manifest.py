"""manifest.json: describes a store, and can be read without this package.

Its last entry, ``crc32``, is the CRC-32 of all bytes before the comma in front of it, in hexadecimal digits. It detects
a changed digit, which would still be valid JSON. Version 3 had no such entry. Since version 5, ``package`` is the
version of the package that wrote the file, and ``tasklet_bytes`` the setting that tasklets were cut by. Future versions
keep the entries ``format``, ``version`` and ``package``, so that this version can distinguish a newer store from a
damaged one, and name the version that reads it.

The version also covers ``state.bin`` and ``commit.bin``: a change of any of the three raises it.
"""

from __future__ import annotations

import json
import os
import re
import uuid
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lightning_smartinfinity import __version__, native
from lightning_smartinfinity.common.versions import unreadable
from lightning_smartinfinity.errors import StorageCorruptError, StorageError
from lightning_smartinfinity.native.formats import STATE_FORMATS
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage.extents import ExtentMap
from lightning_smartinfinity.storage.folders.open_folder import OpenFolder
from lightning_smartinfinity.storage.io.os_errors import storage_errors

__all__ = ["FORMAT_VERSION", "MANIFEST_NAME", "Manifest", "StoreDescription", "manifest_content", "read_manifest"]

FORMAT_NAME = "lightning-smartinfinity optimizer state"
FORMAT_VERSION = 5
_VERSION_WITHOUT_CHECKSUM = 3
_CHECKSUM = re.compile(rb',\n "crc32": "([0-9a-f]{8})"\n}')

# Fields of ExtentMap that have another name in the file.
_KEYS = {"places_per_tasklet": "num_slots"}
MANIFEST_NAME = "manifest.json"

# Far above the numbers of any training. Without limits, a damaged number could request more memory than there is.
_MAX_BYTES = 1 << 30
_MAX_NUMBERS = {"numel": 1 << 50, "tasklet_numel": 1 << 50, "num_arrays": 64, "num_devices": 1 << 16}
_MAX_RANKS = 1 << 32

# Errors from parsing damaged or foreign text.
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, AssertionError, OverflowError, RecursionError)


@dataclass(frozen=True, kw_only=True)
class StoreDescription:
    """The part of the manifest that the store itself does not need. JSON values only.

    Args:
        optimizer: Class name of the optimizer.
        arrays: Names of the arrays per element, ``"master"`` first.
        parameters: One mapping per parameter, in partition order: name, numel, real_numel, group, sub_group, dtype.
        groups: Hyperparameters of each parameter group at creation, for readers.
        tasklet_bytes: Largest extent of a tasklet, in bytes, as the settings were; 0 if unknown, as for older stores.
    """

    optimizer: str
    arrays: tuple[str, ...]
    parameters: tuple[Mapping[str, Any], ...]
    groups: tuple[Mapping[str, Any], ...] = field(default=())
    tasklet_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json.

    Args:
        job: 16 bytes that every extent and commit record of the store carries.
        rank: Rank of the owner.
        world_size: Number of ranks of the job.
        durability: ``TransferConfig.durability``.
        keep: Whether a later job must leave this store alone.
        extents: The extents of the tasklets.
        description: Optimizer, arrays and parameters.
        folders: Storage folders of the rank, one per device; for readers and messages.
        device: Index of the folder that holds this manifest.
        num_machines: Number of machines that the ranks ran on; 0 if it is unknown, as for older stores.
    """

    job: bytes
    rank: int
    world_size: int
    durability: str
    keep: bool
    extents: ExtentMap
    description: StoreDescription
    folders: tuple[str, ...]
    device: int = 0
    num_machines: int = 0

    @property
    def identity(self) -> native.Identity:
        """The identity that every extent carries."""
        return native.Identity(job=self.job, rank=self.rank, state_format=self.extents.format.number)

    @property
    def state_format(self) -> str:
        """Name of the format of the state in an extent."""
        return self.extents.state_format

    def for_device(self, device: int) -> Manifest:
        """Return the manifest for another of the rank's storage folders."""
        return replace(self, device=device)


def manifest_content(manifest: Manifest) -> bytes:
    """Return the content of manifest.json."""
    content = json.dumps(_to_json(manifest), indent=1, default=str).encode().removesuffix(b"\n}")
    return b'%s,\n "crc32": "%08x"\n}' % (content, zlib.crc32(content))


def read_manifest(folder: OpenFolder) -> Manifest:
    """Read and check the manifest in a rank's folder.

    Raises:
        StorageCorruptError: The file is not a manifest of this package, has a format that this version cannot read, or
            was changed.
        StorageError: The file cannot be read, or is an undamaged manifest of a newer version of this package.
    """
    path = folder.path / MANIFEST_NAME
    with storage_errors("Reading", path):
        status = folder.status(MANIFEST_NAME)
        if status is not None and status.st_size > _MAX_BYTES:
            raise _damaged(path)
        content = folder.read(MANIFEST_NAME)
    try:
        values = json.loads(content)
        if values["format"] != FORMAT_NAME:
            raise KeyError("format")
        version = int(values["version"])
    except _DAMAGE as error:
        raise _damaged(path) from error
    reads = (_VERSION_WITHOUT_CHECKSUM, FORMAT_VERSION)
    _verify(content, path, has_checksum=_VERSION_WITHOUT_CHECKSUM < version <= FORMAT_VERSION)
    if version > FORMAT_VERSION:
        writer = str(values.get("package", ""))
        problem, remedy = unreadable(repr(str(path)), version=version, reads=reads, writer=writer)
        raise StorageError(problem, f"{remedy}, or choose another TransferConfig(job=...).")
    if not reads[0] <= version <= reads[1]:
        raise StorageCorruptError(
            f"{str(path)!r} has format version {version}; this package reads versions {reads[0]} to {reads[1]}.",
            "Use the version of the package that wrote it, or remove the folder to start anew.",
        )
    if values.get("state_format") not in tuple(STATE_FORMATS):
        raise (StorageCorruptError if version == _VERSION_WITHOUT_CHECKSUM else StorageError)(
            f"{str(path)!r} says that the optimizer state is in the format {values.get('state_format')!r}; this package"
            f" reads {', '.join(STATE_FORMATS)}.",
            "Use the version of the package that wrote it, or remove the folder to start anew.",
        )
    try:
        return _from_json(values)
    except _DAMAGE as error:
        raise _damaged(path) from error


def _verify(content: bytes, path: Path, *, has_checksum: bool) -> None:
    """Compare a manifest with its checksum, whatever its version, which may itself be damaged.

    Args:
        content: Content of the file.
        path: Its path, for the error.
        has_checksum: Whether all manifests of its version have a checksum.

    Raises:
        StorageCorruptError: The checksum differs, or is missing.
    """
    checksum = _checksum_of(content)
    if has_checksum if checksum is None else checksum != zlib.crc32(_body(content)):
        raise StorageCorruptError(
            f"{str(path)!r} does not match its checksum: something changed it after this package had written it.",
            "Resume from a checkpoint with a new store: remove the folder or choose another TransferConfig(job=...).",
        )


def _body(content: bytes) -> bytes:
    return content[: max(content.rfind(b","), 0)]


def _checksum_of(content: bytes) -> int | None:
    found = _CHECKSUM.fullmatch(content, len(_body(content)))
    return None if found is None else int(found[1], 16)


def _to_json(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "package": __version__,
        "job": str(uuid.UUID(bytes=manifest.job)),
        "rank": manifest.rank,
        "world_size": manifest.world_size,
        "machines": manifest.num_machines,
        "state_format": manifest.state_format,
        "durability": manifest.durability,
        "keep": manifest.keep,
        "folders": list(manifest.folders),
        "device": manifest.device,
        "layout": {
            _KEYS.get(key, key): value for key, value in asdict(manifest.extents).items() if key != "state_format"
        },
        # asdict would copy the description of every parameter, field by field.
        **vars(manifest.description),
    }


def _from_json(values: Mapping[str, Any]) -> Manifest:
    manifest = Manifest(
        job=uuid.UUID(values["job"]).bytes,
        rank=int(values["rank"]),
        world_size=int(values["world_size"]),
        num_machines=int(values.get("machines", 0)),
        durability=str(values["durability"]),
        keep=bool(values["keep"]),
        folders=tuple(values["folders"]),
        device=int(values["device"]),
        extents=_extents(str(values["state_format"]), values["layout"]),
        description=StoreDescription(
            optimizer=str(values["optimizer"]),
            arrays=tuple(map(str, values["arrays"])),
            parameters=tuple(values["parameters"]),
            groups=tuple(values["groups"]),
            tasklet_bytes=int(values.get("tasklet_bytes", 0)),
        ),
    )
    if not all(isinstance(folder, str) and b"\0" not in os.fsencode(folder) for folder in manifest.folders):
        raise ValueError("a folder is not a path")
    if manifest.extents.places_per_tasklet != TransferConfig(durability=manifest.durability).places_per_tasklet:
        raise ValueError("durability and num_slots contradict each other")
    if len(set(manifest.description.arrays)) != manifest.extents.num_arrays:
        raise ValueError("arrays and num_arrays contradict each other")
    if not 0 <= manifest.rank < manifest.world_size <= _MAX_RANKS:
        raise ValueError("there is no such rank")
    if any(getattr(manifest.extents, name) > largest for name, largest in _MAX_NUMBERS.items()):
        raise ValueError("the layout is larger than that of any store")
    return manifest


def _extents(state_format: str, layout: Mapping[str, Any]) -> ExtentMap:
    names = {key: name for name, key in _KEYS.items()}
    numbers = {names.get(key, key): int(value) for key, value in layout.items() if key != "borders"}
    return ExtentMap(**numbers, state_format=state_format, borders=tuple(map(int, layout["borders"])))


def _damaged(path: Path) -> StorageCorruptError:
    return StorageCorruptError(
        f"{str(path)!r} is not a readable manifest of this package.",
        "Remove its folder to start anew, or choose another TransferConfig(job=...).",
    )
