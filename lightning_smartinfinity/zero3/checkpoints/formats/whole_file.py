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
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lightning_smartinfinity.errors import CheckpointError
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
_DIMENSIONS, _LENGTH_BITS = 64, 63  # of a tensor, at most
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
        CheckpointError: A checksum is wrong, in the file or in memory.
        Exception: The file is missing, damaged otherwise or cannot be read.
    """
    verified = has_checksums(path)
    later = _compared_later(Path(path)) if verified else {}
    if verified:
        but = {place.record for place in later.values()}
        check_records(Path(path), tensors=True, but=but, remedy=_REMEDY)
    loaded = load_by(load, path)
    saved = loaded.pop(CHECKSUMS_KEY, None) if isinstance(loaded, dict) else None
    if later and not _agree(saved, loaded):
        # Damaged, or read wrong; or another program has changed the weights and saved the file with new CRC-32s; or the
        # loading function returns other content than the file's.
        check_records(Path(path), tensors=True, remedy=_REMEDY)
        _check_in_memory(Path(path), later, loaded)
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


class _Place(NamedTuple):
    """A tensor that covers the whole of a record."""

    record: str
    type: str  # end of Tensor.type()


@bounded("Reading")
def _compared_later(path: Path) -> Mapping[str, _Place]:
    """Return, by name, the places of the weights whose CRC-32C the file holds, to be compared in memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (info.filename for info in archive.infolist() if info.filename.endswith(_PICKLE))
            content = archive.read(name)
        if CHECKSUMS_KEY.encode() not in content:
            return {}
        state = _Places(io.BytesIO(content), folder=name.removesuffix(_PICKLE)).load()
        weights = ((weight, state["state_dict"].get(weight)) for weight in _names_in(state[CHECKSUMS_KEY]))
        return {name: place for name, place in weights if isinstance(place, _Place)}
    except Exception:  # damaged, or another program's: all of the file's own checksums are compared
        return {}


class _Inert:
    """Stands for everything in a pickle but plain values and tensors; accepts what a pickle adds to an object."""

    def __new__(cls, *_: object, **__: object) -> _Inert:
        return object.__new__(cls)

    def _ignore(self, *_: object) -> None:
        pass

    __setitem__ = append = extend = add = update = _ignore


def _drop_state(unpickler: Any) -> None:
    unpickler.stack.pop()


class _Places(pickle._Unpickler):
    """Reads where the tensors of a file are; imports and calls nothing that the file names, and sets no attributes.

    It is Python's own implementation because C's takes as much memory as a damaged or hostile number in the file says.

    Args:
        content: The file's pickle.
        folder: Folder of the records in the file.
    """

    dispatch: ClassVar[dict[int, Any]] = {**pickle._Unpickler.dispatch, pickle.BUILD[0]: _drop_state}
    del dispatch[pickle.BYTEARRAY8[0]]  # takes as much memory as the file says

    def __init__(self, content: io.BytesIO, *, folder: str) -> None:
        super().__init__(content)
        self._folder = folder

    def find_class(self, module: str, name: str) -> Any:
        """Return a harmless stand-in: for a class of storages, the name of its elements' type."""
        if module.startswith("torch") and name.endswith("Storage"):
            return name.removesuffix("Storage")
        known = {("torch._utils", "_rebuild_tensor_v2"): _place_of, ("collections", "OrderedDict"): dict}
        return known.get((module, name), _Inert)

    def persistent_load(self, saved: Any) -> Any:
        """Return a storage's place, and its number of elements."""
        _, elements, key, _, numel = saved
        return _Place(self._folder + "/data/" + key, "." + elements + "Tensor"), numel


def _place_of(
    storage: tuple[_Place, int], offset: int, size: tuple[int, ...], stride: tuple[int, ...], *_: object
) -> _Place | None:
    place, numel = storage
    if len(size) > _DIMENSIONS or any(length >> _LENGTH_BITS for length in size):
        return None  # products of these could take any time
    in_order = tuple(prod(size[dim + 1 :]) for dim in range(len(size)))
    return place if (offset, prod(size), stride) == (0, numel, in_order) else None


def _names_in(saved: Any) -> Sequence[str]:
    """Return the names of the weights with CRC-32C; none if a later version wrote them, which CRC-32s cover, too."""
    is_known = saved["version"] == CHECKSUMS_VERSION and saved["block_bytes"] == BLOCK_BYTES
    names: Sequence[str] = saved["names"] if is_known else ()
    return names


def _agree(saved: Any, loaded: Any) -> bool:
    """Return whether the weights have the CRC-32C that were saved with them; False if none are left to compare."""
    try:
        values = [loaded["state_dict"][name] for name in _names_in(saved)]
        with ThreadPoolExecutor(_THREADS) as pool:
            found = list(chain.from_iterable(pool.map(_checksums_in, values)))
        return bool(values) and found == saved["crc32c"].tolist()
    except Exception:  # of other content, or of values that are not dense
        return False


def _checksums_in(value: torch.Tensor) -> list[int]:
    return checksums_of(_bytes_of(value))


def _bytes_of(value: torch.Tensor) -> NDArray[np.uint8]:
    if not value.is_contiguous():  # a copy of an expanded tensor could be larger than the memory
        raise ValueError("it is not contiguous")
    content: NDArray[np.uint8] = value.detach().cpu().flatten().view(torch.uint8).numpy()
    return content


@bounded("Reading")
def _check_in_memory(path: Path, later: Mapping[str, _Place], loaded: Any) -> None:
    """Compare weights in memory with the CRC-32s of an intact file, unless the loading function has changed them.

    Raises:
        CheckpointError: A value was read wrong.
    """
    with zipfile.ZipFile(path) as archive:
        for name, place in later.items():
            if not _is_as_stored(loaded, name, place, archive.getinfo(place.record)):
                raise CheckpointError(
                    f"{path} was read wrong: {name!r} in memory is not what the file holds, which is intact.",
                    "Load it again. If it happens again, test the memory and the drive of this machine.",
                )


def _is_as_stored(loaded: Any, name: str, place: _Place, info: zipfile.ZipInfo) -> bool:
    """Return False if a value of the stored dtype and size has another CRC-32."""
    try:
        value = loaded["state_dict"][name]
        content = _bytes_of(value)
    except Exception:  # it is missing or not dense
        return True
    is_changed = not value.type().endswith(place.type) or content.nbytes != info.file_size
    return is_changed or zlib.crc32(content.data) == info.CRC
