"""Loads whole files of ``torch.save``, such as exports, and compares all checksums in them; torch itself compares none.

Every record of such a file has a CRC-32. CRC-32C takes a quarter of the time here, so exports hold that of their
weights, too, under :data:`CHECKSUMS_KEY`: of each block of each named entry of ``state_dict``, in order. It is compared
with the values in memory, which spares reading the file twice.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from lightning_smartinfinity.storage.io.files import bounded
from lightning_smartinfinity.zero3.checkpoints.formats.part_checksums import (
    BLOCK_BYTES,
    CHECKSUMS_VERSION,
    checksums_of,
    num_blocks,
)
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import ZIP_DAMAGE, check_records
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_by, require_file
from lightning_smartinfinity.zero3.untyped import Pickled

__all__ = ["CHECKSUMS_KEY", "has_checksums", "load_verified", "room_for_checksums"]

CHECKSUMS_KEY = "smart_infinity_checksums"
"""Key of the checksums in the file."""

_THREADS = 4  # two cores compared 18 GB/s, the limit of their memory
_ZIP_MAGIC = b"PK"
_PICKLE = "/data.pkl"
_REMEDY = "Export or copy it again, or use another file."


def room_for_checksums(names: Sequence[str], sizes: Sequence[int]) -> dict[str, object]:
    """Return the entry of a new file for :data:`CHECKSUMS_KEY`, whose tensor ``crc32c`` is to be filled.

    Args:
        names: Entries of ``state_dict`` with checksums.
        sizes: Bytes of each of them.
    """
    numel = sum(map(num_blocks, sizes))
    return {
        "version": CHECKSUMS_VERSION,
        "block_bytes": BLOCK_BYTES,
        "names": list(names),
        "crc32c": torch.empty(numel, dtype=torch.int64),
    }


def load_verified(load: Callable[..., Pickled], path: str | Path) -> Pickled:
    """Load a file like ``load_by``, and compare its checksums before the content is returned.

    Warns if the file has no checksums.

    Raises:
        CheckpointError: A checksum is wrong.
        Exception: The file is missing, damaged otherwise or cannot be read.
    """
    verified = has_checksums(path)
    later = _compared_later(Path(path)) if verified else ()
    if verified:
        check_records(Path(path), tensors=True, but=later, remedy=_REMEDY)
    loaded = load_by(load, path)
    saved = loaded.pop(CHECKSUMS_KEY, None) if isinstance(loaded, dict) else None
    if later and not _agree(saved, loaded):
        # Damaged; or another program has changed the weights and saved the file with new CRC-32s; or the loading
        # function returns other content than the file's.
        check_records(Path(path), tensors=True, remedy=_REMEDY)
    if not verified and not (dist.is_initialized() and dist.get_rank() > 0):
        warnings.warn(
            f"{path} was loaded without being verified: it has no checksums, or is not a local file. Damage would not "
            "be noticed.",
            stacklevel=2,
        )
    return loaded


@bounded("Reading")
def has_checksums(path: str | Path) -> bool:
    """Return whether a local file has checksums: neither torch's format before 1.6 nor without CRC-32s.

    ``torch.serialization.set_crc32_options(False)`` makes torch write zeros in their place.

    Raises:
        CheckpointError: The path is not a regular file.
        OSError: The file cannot be read.
    """
    require_file(path)
    if not os.path.exists(path):  # a URL; or missing, which the loading function reports
        return False
    with open(path, "rb") as file:
        magic = file.read(len(_ZIP_MAGIC))
        if magic and magic != _ZIP_MAGIC:  # the comparison reports an empty file
            return False
        try:
            with zipfile.ZipFile(file) as archive:
                return any(info.CRC for info in archive.infolist())
        except ZIP_DAMAGE:  # the comparison reports it
            return True


@bounded("Reading")
def _compared_later(path: Path) -> Collection[str]:
    """Return the names of the records with weights whose CRC-32C the file holds, to be compared in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (info.filename for info in archive.infolist() if info.filename.endswith(_PICKLE))
            content = archive.read(name)
        if CHECKSUMS_KEY.encode() not in content:
            return ()
        state = _Places(io.BytesIO(content)).load()
        weights = (state["state_dict"].get(weight) for weight in _names_in(state.get(CHECKSUMS_KEY)))
        return {f"{name.removesuffix(_PICKLE)}/data/{weight.key}" for weight in weights if isinstance(weight, _Place)}
    except Exception:  # damaged, or another program's: all of the file's own checksums are compared
        return ()


class _Place(NamedTuple):
    """A tensor that covers the whole of a record."""

    key: str


class _Inert:
    """Stands for everything in a pickle but plain values and tensors; accepts all that a pickle does to an object."""

    def __new__(cls, *_: object, **__: object) -> _Inert:
        return object.__new__(cls)

    def _ignore(self, *_: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = update = _ignore


class _Places(pickle.Unpickler):
    """Reads where the tensors of a file are; imports and calls nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless stand-in."""
        known = {("torch._utils", "_rebuild_tensor_v2"): _place_of, ("collections", "OrderedDict"): OrderedDict}
        return known.get((module, name), _Inert)

    def persistent_load(self, saved: Any) -> Any:
        """Return the key of a storage's record, and its number of elements."""
        _, _, key, _, numel = saved
        return key, numel


def _place_of(storage: tuple[str, int], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Any:
    key, numel = storage
    in_order = tuple(prod(size[dim + 1 :]) for dim in range(len(size)))
    return _Place(key) if (offset, prod(size), stride) == (0, numel, in_order) else None


def _names_in(saved: Any) -> Sequence[str]:
    """Return the names of the weights with CRC-32C; none if a later version wrote them, which CRC-32s cover, too."""
    if not isinstance(saved, Mapping):
        return ()
    is_known = saved["version"] == CHECKSUMS_VERSION and saved["block_bytes"] == BLOCK_BYTES
    names: Sequence[str] = saved["names"] if is_known else ()
    return names


def _agree(saved: Any, loaded: Mapping[str, Any]) -> bool:
    """Return whether the weights have the CRC-32C that were saved with them; False if none are left to compare."""
    names = _names_in(saved)
    if not names:
        return False
    values = [loaded.get("state_dict", {}).get(name) for name in names]
    if not all(isinstance(value, torch.Tensor) for value in values):
        return False
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(chain.from_iterable(pool.map(_checksums_in, values)))
    expected: list[int] = saved["crc32c"].tolist()
    return found == expected


def _checksums_in(value: torch.Tensor) -> list[int]:
    return checksums_of(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
