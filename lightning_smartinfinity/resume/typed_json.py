"""Writes values of nested Python containers as JSON that keeps every type, and then arrays' bytes, without pickle.

::

    u64         number of bytes of the JSON, little endian
    JSON        ASCII
    arrays      raw bytes, each from the next multiple of 64 on, in the order in which the JSON mentions them

None, bool, int, finite float, str and list are the JSON types. Every other value is a JSON object with one key, the
name of its type: ``{"tuple": [1, 2]}``, ``{"dict": {"lr": 0.1}}``, ``{"Tensor": ["torch.float32", [2, 3]]}``. The JSON
contains no offsets of arrays, so that no array can be read twice.

Only exact types are written, because a subclass may hold more. Values that are read are new objects: tensors are on the
CPU, and two references to one list become two lists. Numbers are little endian.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import date, datetime, timedelta, timezone
from itertools import accumulate
from pathlib import PosixPath, PurePosixPath
from typing import Any

import numpy as np
import torch

from lightning_smartinfinity.settings.rules import shown

__all__ = ["UnwritableError", "decode", "encode"]

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_MOST_NESTED = 100
_MOST_DIMENSIONS = 64  # numpy's limit
_LEAST_PACKED = 33  # a shorter list of ints is as cheap in the JSON
_JSON = json.JSONEncoder(ensure_ascii=True, check_circular=False, allow_nan=False, separators=(",", ":"))
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)
_FACTORIES: dict[str | None, Any] = {None: None} | {kind.__name__: kind for kind in (int, float, list, dict, set, str)}
_SURROGATE = re.compile("[\\ud800-\\udfff]")  # JSON would join two lone ones to one character
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_TENSOR_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not name.startswith("torch.q")}  # quantized ones
_NUMPY_NAME = re.compile(r"[<>|](?:[biufc]\d{1,2}|[lLqQgG]|[US]\d{1,9})", re.ASCII)
_NUMPY_DTYPES = {type(np.dtype(code)) for code in np.typecodes["All"]}
_NUMPY_NUMBERS = {np.dtype(code).type for code in np.typecodes["All"] if np.dtype(code).kind in "biufc"}


class UnwritableError(Exception):
    """A value has a part that :func:`encode` cannot write.

    Args:
        where: Place of the part, in Python's notation from the root on: ``['callbacks']['a'][3]``. A key of a dict and
            a member of a set have the place of their container.
        value: The part.
        reason: The reason, unless it is the type of the part.
    """

    def __init__(self, where: str, value: object, reason: str = "") -> None:
        super().__init__(where, reason)
        kind = type(value)
        self.where, self.reason = where, reason
        self.type_name = f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")

    def __str__(self) -> str:
        return f"{self.where or 'The value'} is of type {self.type_name}{self.reason and f', {self.reason}'}"


def encode(value: Any) -> bytes:
    """Return a value as bytes, from which :func:`decode` makes a value of the same types and bits.

    Args:
        value: None, bool, int, float, complex, str, bytes, bytearray, or a list, tuple, dict, set, frozenset, deque,
            OrderedDict, Counter, argparse.Namespace or torch.Size of such values. A defaultdict may have None, int,
            float, list, dict, set or str as its factory. Also torch's tensors, parameters, dtypes and devices; numpy's
            arrays and scalars of numbers, bools and text, and its dtypes; POSIX paths; dates, datetimes with a fixed
            offset from UTC or none, and timedeltas.

    Raises:
        UnwritableError: A part is of another type, contains itself, or is nested too deeply.
    """
    writer = _Writer()
    text = _JSON.encode(writer.write(value)).encode("ascii")
    parts = [len(text).to_bytes(_LENGTH_BYTES, "little"), text]
    size = _LENGTH_BYTES + len(text)
    for array in writer.arrays:
        padding = -size % _ALIGNMENT
        parts += bytes(padding), array
        size += padding + len(array)
    return b"".join(parts)


def decode(content: bytes) -> Any:
    """Return the value in a result of :func:`encode`.

    This runs no code that the content names, and allocates at most a small multiple of the content's length.

    Raises:
        ValueError: The content is not a result of ``encode``.
    """
    try:
        end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        if not _LENGTH_BYTES < end <= len(content):
            raise ValueError("it is shorter than it says")
        text = str(content[_LENGTH_BYTES:end], "ascii")
        firsts = (text[token.start()] for token in _TOKEN.finditer(text))
        # The JSON module, written in C, would recurse too deep; one container of Python is up to three of JSON.
        if any(depth > 4 * _MOST_NESTED for depth in accumulate((each in "[{") - (each in "]}") for each in firsts)):
            raise ValueError("it is nested too deep")
        reader = _Reader(memoryview(content), end)
        value = reader.read(json.loads(text, parse_constant=_TABLE.__getitem__))  # NaN has no row
        if reader.position != len(content):
            raise ValueError("it is longer than its arrays")
        return value
    except Exception as error:  # torch and numpy raise many kinds of errors for invalid values
        raise ValueError(f"The content is damaged or not of this format: {error}") from error


class _Writer:
    """Turns values into values for the JSON encoder, and collects the bytes of arrays."""

    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._open: set[int] = set()

    def write(self, value: Any) -> Any:
        kind = type(value)
        if _is_json(value, kind):
            return value
        if kind in (list, tuple) and len(value) >= _LEAST_PACKED and set(map(type, value)) == {int}:
            with suppress(OverflowError):
                self.arrays.append(np.array(value, "<i8").tobytes())
                return {f"{kind.__name__} of int64": len(value)}
        if kind is list:
            return self.elements(value)
        if kind not in _BY_TYPE:
            raise UnwritableError("", value)
        tag, write = _BY_TYPE[kind]
        return {tag: write(self, value)}

    def append(self, array: bytes) -> int:
        self.arrays.append(bytes(array))
        return len(array)

    def mapping(self, container: Mapping[Any, Any], place: Callable[[Any], str] = lambda key: f"[{shown(key)}]") -> Any:
        keys = list(container)
        are_names = all(type(key) is str and key.isascii() for key in keys)
        forms = keys if are_names else self.members(container)
        values = self.elements(container, container.values(), lambda index: place(keys[index]))
        return dict(zip(forms, values, strict=True)) if are_names else [forms, values]

    def attributes(self, owner: object) -> Any:
        return self.mapping(vars(owner), ".{}".format)

    def members(self, container: Any) -> list[Any]:
        return self.elements(container, place="".format)

    def elements(self, container: Any, values: Any = None, place: Callable[[Any], str] = "[{}]".format) -> list[Any]:
        if id(container) in self._open:
            raise UnwritableError("", container, "and contains itself")
        if len(self._open) == _MOST_NESTED:
            raise UnwritableError("", container, f"inside of more than {_MOST_NESTED} others")
        self._open.add(id(container))
        written: list[Any] = []
        try:
            for element in container if values is None else values:
                written.append(self.write(element))
        except UnwritableError as error:
            error.where = place(len(written)) + error.where
            raise
        self._open.discard(id(container))
        return written


class _Reader:
    """Turns parsed JSON back into values, and takes arrays from the content in their order."""

    def __init__(self, content: memoryview, position: int) -> None:
        self.content, self.position = content, position

    def read(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.read(element) for element in form]
        if not isinstance(form, dict):
            return form
        ((tag, inner),) = form.items()
        return _TABLE[tag][2](self, inner)

    def elements(self, forms: Any) -> list[Any]:
        return [self.read(element) for element in _checked(forms, list)]

    def mapping(self, form: Any) -> dict[Any, Any]:
        if isinstance(form, dict):
            return {key: self.read(value) for key, value in form.items()}
        keys, values = form
        return dict(zip(self.elements(keys), self.elements(values), strict=True))

    def take(self, num_bytes: Any) -> memoryview:
        start = self.position + -self.position % _ALIGNMENT
        if not 0 <= _checked(num_bytes, int) <= len(self.content) - start:
            raise ValueError("it ends before its arrays")
        self.position = start + num_bytes
        return self.content[start : self.position]

    def text(self, form: Any) -> Any:
        return _checked(self.read(form), str)

    def packed(self, count: Any) -> Any:
        return np.frombuffer(self.take(_checked(count, int) * 8), "<i8").tolist()


def _is_json(value: Any, kind: type) -> bool:
    """Return whether JSON keeps the value; Python limits the digits of the integers that it formats and parses."""
    if kind is str:
        return value.isascii() or not _SURROGATE.search(value)
    is_short = (kind is int and value.bit_length() < 1000) or (kind is float and math.isfinite(value))
    return value is None or kind is bool or is_short


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} in place of {kind.__name__}")
    return value


def _ints(form: Any) -> list[int]:
    return [_checked(number, int) for number in _checked(form, list)]


def _numel(shape: Any) -> int:
    lengths = _ints(shape)
    if len(lengths) > _MOST_DIMENSIONS or not all(0 <= length < 2**63 for length in lengths):
        raise ValueError("an array has no possible shape")
    return math.prod(lengths)


def _read_deque(reader: _Reader, form: Any) -> deque[Any]:
    maxlen, elements = form
    return deque(reader.elements(elements), maxlen)


def _plain(value: Any, *known: str) -> Any:
    """Return a container that has only known attributes; Module.state_dict keeps versions in ``_metadata``."""
    if vars(value).keys() - set(known):
        raise UnwritableError("", value, "with attributes")
    return value


def _read_ordered_dict(reader: _Reader, form: Any) -> OrderedDict[Any, Any]:
    items, attributes = form
    value = OrderedDict(reader.mapping(items))
    vars(value).update(reader.mapping(attributes))
    if vars(value).keys() - {"_metadata"}:
        raise ValueError("an OrderedDict has attributes")
    return value


def _write_default_dict(writer: _Writer, value: defaultdict[Any, Any]) -> Any:
    names = [name for name, factory in _FACTORIES.items() if factory is value.default_factory]
    if not names:
        raise UnwritableError("", value, "with a default_factory of the user's")
    return [*names, writer.mapping(value)]


def _read_default_dict(reader: _Reader, form: Any) -> defaultdict[Any, Any]:
    name, items = form
    return defaultdict(_FACTORIES[name], reader.mapping(items))


def _read_namespace(reader: _Reader, form: Any) -> argparse.Namespace:
    value = argparse.Namespace()
    vars(value).update((_checked(name, str), attribute) for name, attribute in reader.mapping(form).items())
    return value


def _write_tensor(writer: _Writer, tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise UnwritableError("", tensor, "and is sparse, nested, quantized or without data")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise UnwritableError("", tensor, f"of more than {_MOST_DIMENSIONS} dimensions")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    writer.arrays.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return [str(tensor.dtype), list(tensor.shape)]


def _read_tensor(reader: _Reader, form: Any) -> torch.Tensor:
    name, shape = form
    dtype = _TENSOR_DTYPES[name]
    raw = reader.take(_numel(shape) * dtype.itemsize)
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = np.frombuffer(raw, np.uint8).copy()
    # A byte above one is not a valid bool: torch's behaviour would be undefined.
    return torch.from_numpy(flat != 0 if dtype is torch.bool else flat).view(dtype).reshape(shape)


def _read_parameter(reader: _Reader, form: Any) -> torch.nn.Parameter:
    name, shape, requires_grad = form
    return torch.nn.Parameter(_read_tensor(reader, [name, shape]), requires_grad=_checked(requires_grad, bool))


def _numpy_name(value: object, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in "biufcUS" or dtype.metadata is not None:
        raise UnwritableError("", value, f"with the dtype {dtype}")
    if np.dtype(dtype.str).char == dtype.char:
        return dtype.str
    return f"{dtype.str[0]}{dtype.char}"  # C has two names for some sizes, and numpy a type for each of them


def _numpy_dtype(name: Any) -> Any:
    if not _NUMPY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    return np.dtype(name)


def _write_array(writer: _Writer, value: np.ndarray[Any, Any]) -> Any:
    name = _numpy_name(value, value.dtype)
    if value.dtype.itemsize == 0:
        raise UnwritableError("", value, "of items without bytes")
    writer.arrays.append(value.tobytes())
    return [name, list(value.shape)]


def _read_array(reader: _Reader, form: Any) -> np.ndarray[Any, Any]:
    name, shape = form
    dtype = _numpy_dtype(name)
    if dtype.itemsize == 0:
        raise ValueError("an array has items without bytes")
    raw = reader.take(_numel(shape) * dtype.itemsize)
    if dtype.kind == "U" and (np.frombuffer(raw, f"{dtype.str[0]}u4") > 0x10FFFF).any():
        raise ValueError("a text has characters that do not exist")
    flat = np.frombuffer(raw, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(raw, dtype).copy()
    return flat.reshape(shape)


def _number(dtype: Any, bits: Any) -> Any:
    (number,) = np.frombuffer(bytes.fromhex(bits), _numpy_dtype(dtype))
    return number


def _write_datetime(writer: _Writer, value: datetime) -> Any:
    zone = value.tzinfo
    if zone is not None and not (type(zone) is timezone and str(zone) == str(timezone(zone.utcoffset(None)))):
        raise UnwritableError("", value, "with another time zone than a fixed offset without a name")
    return [value.isoformat(), value.fold]


def _read_datetime(reader: _Reader, form: Any) -> datetime:
    text, fold = form
    return datetime.fromisoformat(text).replace(fold=fold)


_UTF_8 = ("utf-8", "surrogatepass")
_TABLE: dict[str, tuple[Iterable[type], Callable[[_Writer, Any], Any], Callable[[_Reader, Any], Any]]] = {
    "int": ([int], lambda _, v: hex(v), lambda _, f: int(f, 16)),
    "float": ([float], lambda _, v: np.array(v, "<f8").tobytes().hex(), lambda _, f: _number("<f8", f).item()),
    "complex": ([complex], lambda _, v: np.array(v, "<c16").tobytes().hex(), lambda _, f: _number("<c16", f).item()),
    "str": ([str], lambda _, v: v.encode(*_UTF_8).hex(), lambda _, f: bytes.fromhex(f).decode(*_UTF_8)),
    "bytes": ([bytes], _Writer.append, lambda r, f: bytes(r.take(f))),
    "bytearray": ([bytearray], _Writer.append, lambda r, f: bytearray(r.take(f))),
    "list of int64": ([], _Writer.write, _Reader.packed),
    "tuple of int64": ([], _Writer.write, lambda r, f: tuple(r.packed(f))),
    "tuple": ([tuple], _Writer.elements, lambda r, f: tuple(r.elements(f))),
    "set": ([set], _Writer.members, lambda r, f: set(r.elements(f))),
    "frozenset": ([frozenset], _Writer.members, lambda r, f: frozenset(r.elements(f))),
    "deque": ([deque], lambda w, v: [v.maxlen, w.elements(v)], _read_deque),
    "dict": ([dict], _Writer.mapping, _Reader.mapping),
    "OrderedDict": (
        [OrderedDict],
        lambda w, v: [w.mapping(_plain(v, "_metadata")), w.attributes(v)],
        _read_ordered_dict,
    ),
    "Counter": ([Counter], lambda w, v: w.mapping(_plain(v)), lambda r, f: Counter(r.mapping(f))),
    "defaultdict": ([defaultdict], _write_default_dict, _read_default_dict),
    "Namespace": ([argparse.Namespace], _Writer.attributes, _read_namespace),
    "Size": ([torch.Size], lambda _, v: list(v), lambda _, f: torch.Size(_ints(f))),
    "Tensor": ([torch.Tensor], _write_tensor, _read_tensor),
    "Parameter": ([torch.nn.Parameter], lambda w, v: [*_write_tensor(w, v), v.requires_grad], _read_parameter),
    "dtype": ([torch.dtype], lambda _, v: str(v), lambda _, f: _DTYPES[f]),
    "device": ([torch.device], lambda _, v: str(v), lambda _, f: torch.device(_checked(f, str))),
    "ndarray": ([np.ndarray], _write_array, _read_array),
    "numpy": (_NUMPY_NUMBERS, lambda _, v: [_numpy_name(v, v.dtype), v.tobytes().hex()], lambda _, f: _number(*f)),
    "numpy dtype": (_NUMPY_DTYPES, lambda _, v: _numpy_name(v, v), lambda _, f: _numpy_dtype(f)),
    "str_": ([np.str_], lambda w, v: w.write(str(v)), lambda r, f: np.str_(r.text(f))),
    "bytes_": ([np.bytes_], lambda _, v: bytes(v).hex(), lambda _, f: np.bytes_(bytes.fromhex(f))),
    "PosixPath": ([PosixPath], lambda w, v: w.write(str(v)), lambda r, f: PosixPath(r.text(f))),
    "PurePosixPath": ([PurePosixPath], lambda w, v: w.write(str(v)), lambda r, f: PurePosixPath(r.text(f))),
    "date": ([date], lambda _, v: v.isoformat(), lambda _, f: date.fromisoformat(f)),
    "datetime": ([datetime], _write_datetime, _read_datetime),
    "timedelta": ([timedelta], lambda _, v: [v.days, v.seconds, v.microseconds], lambda _, f: timedelta(*_ints(f))),
}
"""Rows of the format: a tag, its types, and functions that write a value ``v`` and read it back from its form ``f``.
``_Writer.write`` itself writes JSON's own types, and packs lists and tuples of ints."""

_BY_TYPE = {kind: (tag, write) for tag, (kinds, write, _) in _TABLE.items() for kind in kinds}
