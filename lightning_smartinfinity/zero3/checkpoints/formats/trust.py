"""Decides whether a file may name code to run: the only caller of ``torch.load`` in this package.

``torch.save`` writes a pickle, and a pickle may call any function of any module when it is loaded. So only tensors,
numbers, text, containers of these, and the types that
:mod:`lightning_smartinfinity.zero3.checkpoints.formats.harmless` adds are loaded, unless the user has consented in the
call that loads: ``Trainer.fit``, ``Fabric.load``, a command. This package itself writes only tensors, numbers, text and
containers of these.
"""

from __future__ import annotations

import mmap
import os
import pickle
import re
import stat
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from copy import copy
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_smartinfinity.common.fake_tensors import fake_tensors
from lightning_smartinfinity.common.patches import replaced
from lightning_smartinfinity.errors import CheckpointError
from lightning_smartinfinity.storage.folders.open_folder import kind_of
from lightning_smartinfinity.storage.io.files import limited
from lightning_smartinfinity.zero3.checkpoints.formats.harmless import harmless_types, with_arrays
from lightning_smartinfinity.zero3.untyped import Pickled

__all__ = [
    "ReadWhenUsed",
    "check_plain",
    "loading_policy",
    "load_by",
    "load_file",
    "load_without_memory",
    "read_mapped",
    "require_file",
    "warn_of_types",
]

T = TypeVar("T")

_NAMED = 5
_MAP_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)  # missing in older Python versions
_WARNED: set[str] = set()
_IN_MESSAGE = re.compile(r"GLOBAL ([\w.]+)")


class _Door(NamedTuple):
    weights_only: bool
    consent: str


_NO_DOOR = _Door(weights_only=True, consent="weights_only=False where you load it")
_DOOR: ContextVar[_Door] = ContextVar("_DOOR", default=_NO_DOOR)


@contextmanager
def loading_policy(weights_only: bool | None, *, consent: str) -> Iterator[None]:
    """Set within this context whether files may hold more than tensors, numbers, text and containers of these.

    Args:
        weights_only: False is the user's consent to run any code that the files name; None means True.
        consent: Text for errors: the argument that a user who trusts the files must pass.
    """
    token = _DOOR.set(_Door(weights_only is not False, consent))
    try:
        yield
    finally:
        _DOOR.reset(token)


def _restricts() -> bool:
    """Return whether files may hold only harmless types: the default, and ``weights_only=True``."""
    return _DOOR.get().weights_only


def load_file(file: str | Path, **options: Any) -> Pickled:
    """Load a file of ``torch.save``, with the consent set by :func:`loading_policy`.

    Args:
        file: Path of the file.
        **options: ``map_location`` and ``mmap`` of ``torch.load``.

    Raises:
        CheckpointError: The file holds types that need consent; the message lists them. Nothing was loaded.
        Exception: The file is damaged or cannot be read.
    """
    return limited("Reading", file, load_by, partial(_load, **options), file)


def load_by(load: Callable[..., Pickled], file: str | Path) -> Pickled:
    """Load a file like :func:`load_file`, with another function of its path and ``weights_only``."""
    require_file(file)
    with _naming_types(file), harmless_types():
        return with_arrays(load(file, weights_only=_restricts()))


def _load(file: str | Path, **options: Any) -> Pickled:
    with _path_in_text(file) as path, _MAPPING:
        return torch.load(path, **options)


class _Mapping:
    """Makes torch.load map files by :func:`_mapped` while any thread is loading."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_loads = 0
        self._patch = ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._num_loads == 0:
                self._patch.enter_context(replaced(torch.UntypedStorage, "from_file", _mapped))
            self._num_loads += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_loads -= 1
            if self._num_loads == 0:
                self._patch.close()


_MAPPING = _Mapping()


def _mapped(path: str, shared: bool, nbytes: int) -> torch.UntypedStorage:
    """Map a file as torch does, but reserve no memory: Linux would refuse a file larger than the memory.

    Pages are copied on write, regardless of torch's default for mapped files.
    """
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), nbytes, flags=mmap.MAP_PRIVATE | _MAP_NORESERVE)
    return torch.frombuffer(mapping, dtype=torch.uint8).untyped_storage()


@contextmanager
def _path_in_text(file: str | Path) -> Iterator[str | Path]:
    """Yield a path of the file that is valid text: torch cannot map files with other paths."""
    try:
        os.fspath(file).encode()
    except UnicodeEncodeError:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
    else:
        yield file


def load_without_memory(file: Path, *, written_here: bool = False) -> Pickled:
    """Load a file like :func:`load_file`, with tensors that have no memory; their bytes are not read.

    Args:
        file: Path of the file.
        written_here: Whether this process has just written the file, so that it can be trusted.
    """

    def load() -> Pickled:
        with fake_tensors(), loading_policy(False, consent="") if written_here else nullcontext():
            return load_file(file)

    return limited("Reading", file, load)


def read_mapped(tensors: Mapping[str, T], path: Path) -> Mapping[str, T]:
    """Return a copy of a mapping with the tensors of a mapped file read into memory, within the I/O time limit.

    Args:
        tensors: Tensors of the file, and other values, which are not copied.
        path: Path of the file, for the error.

    Raises:
        StorageTimeoutError: The disk does not answer.
    """

    def read() -> Mapping[str, T]:
        copied: Any = copy(tensors)  # with the attributes of a state dict
        for name, value in tensors.items():
            copied[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return cast("Mapping[str, T]", copied)

    return limited("Reading", path, read)


class ReadWhenUsed(Mapping[str, torch.Tensor]):
    """Tensors of a mapped file; each is read into memory, as by :func:`read_mapped`, when it is looked up.

    Args:
        tensors: The tensors.
        path: Path of the file, for the error.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], path: Path) -> None:
        self._tensors, self._path = tensors, path

    def __getitem__(self, name: str) -> torch.Tensor:
        return limited("Reading", self._path, self._tensors[name].clone)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def require_file(path: str | Path) -> None:
    """Check that a path is a regular file or missing: opening a pipe would wait for another process.

    Raises:
        CheckpointError: The path is a pipe, a device, a socket or a folder. Opening a missing file raises later.
    """
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"{path} is {kind_of(mode)}, and not a regular file.", "Use another checkpoint.")


def warn_of_types(file: str | Path) -> None:
    """Warn once about types in a newly saved file that can be loaded only with the user's consent."""
    types: set[str] = set()
    try:
        with fake_tensors(), harmless_types():
            torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        types = _foreign_types(file, error)
    if types <= _WARNED:
        return
    _WARNED.update(types)
    warnings.warn(
        f"The checkpoint {file} holds more than tensors, numbers and text: {_listed(types)}. Loading it will need"
        " weights_only=False. Save the numbers of such objects instead.",
        stacklevel=2,
    )


def check_plain(file: Path) -> None:
    """Check that :func:`load_file` can load a file here, before any rank begins to load.

    Raises:
        CheckpointError: The file holds types that need consent.
        Exception: The file is damaged or cannot be read.
    """
    if _restricts():
        load_without_memory(file)


@contextmanager
def _naming_types(file: str | Path) -> Iterator[None]:
    """Turn the error of a restricted load into one that lists the types and explains how to consent."""
    try:
        yield
    except pickle.UnpicklingError as error:
        types = _foreign_types(file, error) if _restricts() else set()
        if not types:
            raise
        raise CheckpointError(
            f"{file} holds more than tensors, numbers and text, and was not loaded: {_listed(types)}."
            " To load these types means to run the code that the file names.",
            f"If you trust those who made it, pass {_DOOR.get().consent}; or allow these types alone, by"
            " torch.serialization.add_safe_globals.",
        ) from error


def _foreign_types(file: str | Path, error: pickle.UnpicklingError) -> set[str]:
    """Return the names of types that a restricted load refuses; none if the file is damaged instead."""
    types = set(_IN_MESSAGE.findall(str(error)))
    with suppress(Exception), harmless_types():  # torch raises various errors on unknown files and instructions
        types.update(get_unsafe_globals_in_checkpoint(file))
    return types


def _listed(types: Collection[str]) -> str:
    more = f" and {len(types) - _NAMED} more" if len(types) > _NAMED else ""
    return ", ".join(sorted(types)[:_NAMED]) + more
