"""Allows files to hold numpy arrays and scalars, paths, dates and namespaces without the user's consent.

Callbacks and hyperparameters often hold such values. numpy's own unpickling is not used, because it trusts the file: a
``dtype`` in the file may claim to be numeric but describe objects, which would turn the file's bytes into pointers. So
stand-ins replace numpy's types while a file is loaded. They check the file's data and create the values.
"""

from __future__ import annotations

import argparse
import datetime
import math
import pathlib
import pickle
import re
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch.serialization import get_safe_globals, safe_globals

__all__ = ["harmless_types", "with_arrays"]

_NUMBERS_AND_TEXT = re.compile(r"[biufcSU]\d+")
_OTHER_TYPES = re.compile(r"[OMmV]\d+")
_BYTE_ORDERS = ("<", ">", "|", "=")


class _Dtype:
    """Stands in for ``numpy.dtype``."""

    def __init__(self, text: str, *_: object) -> None:
        if not _NUMBERS_AND_TEXT.fullmatch(text):
            known = _OTHER_TYPES.fullmatch(text)
            # trust.py extracts the types that need consent from messages of this form.
            raise pickle.UnpicklingError(f"GLOBAL numpy.{np.dtype(text).type.__name__}" if known else "A wrong dtype")
        self.dtype: np.dtype[Any] = np.dtype(text)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, order, *described = state
        if order not in _BYTE_ORDERS or described[:3] != [None, None, None]:
            raise pickle.UnpicklingError("A wrong state of a dtype")
        self.dtype = self.dtype.newbyteorder(order)


class _Array:
    """Stands in for ``numpy.ndarray``."""

    array: NDArray[Any] | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, stand_in, column_major, content = state
        self.array = _array(shape, stand_in, content, order="F" if column_major else "C")


def _array(shape: Any, stand_in: Any, content: Any, *, order: Literal["C", "F"] = "C") -> NDArray[Any]:
    fits = (
        isinstance(shape, tuple)
        and all(type(length) is int and length >= 0 for length in shape)
        and isinstance(stand_in, _Dtype)
        and isinstance(content, bytes)
        and len(content) == math.prod(shape) * stand_in.dtype.itemsize
    )
    if not fits:
        raise pickle.UnpicklingError("A wrong state of an array")
    if stand_in.dtype.kind == "U" and content:
        codes = np.frombuffer(content, np.dtype("u4").newbyteorder(stand_in.dtype.byteorder))
        if codes.max() > sys.maxunicode:
            raise pickle.UnpicklingError("An array of text with a number that stands for no character")
    return np.ndarray(shape, stand_in.dtype, content, order=order).copy(order)


def _scalar(stand_in: object, content: object) -> Any:
    return _array((), stand_in, content)[()]


def _reconstruct(*_: object) -> _Array:
    return _Array()


def _no_bytes() -> bytes:
    """Stand in for the class ``bytes``, which files name for an empty value."""
    return b""


def _names(owners: Iterable[str], **values: Callable[..., Any]) -> list[tuple[Callable[..., Any], str]]:
    """Return each value with the names that files may use for it; modules were renamed."""
    return [(value, f"{owner}.{name}") for owner in owners for name, value in values.items()]


_NUMPY = [
    *_names(("numpy",), dtype=_Dtype, ndarray=_Array),
    *_names(("numpy._core.multiarray", "numpy.core.multiarray"), _reconstruct=_reconstruct, scalar=_scalar),
    *_names(("builtins",), bytes=_no_bytes),
]
_OTHERS = [
    *_names(("pathlib", "pathlib._local"), PosixPath=pathlib.PosixPath, PurePosixPath=pathlib.PurePosixPath),
    *_names(("datetime",), datetime=datetime.datetime, date=datetime.date, timedelta=datetime.timedelta),
    *_names(("argparse",), Namespace=argparse.Namespace),
]


def harmless_types() -> AbstractContextManager[object]:
    """Make torch load these types with ``weights_only=True`` in this context; pass results to :func:`with_arrays`."""
    allowed = {each[1] if isinstance(each, tuple) else _full_name(each) for each in get_safe_globals()}
    # Types that the user has allowed by add_safe_globals are left alone: numpy's own do not work with stand-ins.
    numpy = [] if allowed & {name for _, name in _NUMPY} else _NUMPY
    types: list[Any] = [each for each in (*numpy, *_OTHERS) if each[1] not in allowed]
    return safe_globals(types) if types else nullcontext()


def _full_name(each: Any) -> str:
    return f"{each.__module__}.{each.__qualname__}"


def with_arrays(loaded: Any) -> Any:
    """Return a loaded object with stand-ins replaced by numpy's objects.

    Dictionaries and lists are changed in place. An object that is in several places stays a single object.

    Raises:
        UnpicklingError: An array has no content, or the containers are nested too deeply.
    """
    try:
        return _replaced(loaded, {})
    except RecursionError:
        raise pickle.UnpicklingError("Containers are nested too deeply") from None


def _replaced(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return the replacement of a value; ``done`` maps the ids of visited values to value and replacement."""
    if isinstance(value, _Array):
        if value.array is None:
            raise pickle.UnpicklingError("An array without content")
        return value.array
    if isinstance(value, _Dtype):
        return value.dtype
    if id(value) in done:  # visits shared tuples only once
        return done[id(value)][1]
    if type(value) is tuple:
        items = tuple(_replaced(item, done) for item in value)
        changed = any(new is not old for new, old in zip(items, value, strict=True))
        done[id(value)] = (value, items if changed else value)
        return done[id(value)][1]
    content: Any = vars(value) if isinstance(value, argparse.Namespace) else value
    if isinstance(content, dict | list):
        done[id(value)] = (value, value)
        for key, item in content.items() if isinstance(content, dict) else enumerate(content):
            content[key] = _replaced(item, done)
    return value
