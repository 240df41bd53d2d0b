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
import datetime
import json
import math
import pathlib
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from lightning_smartinfinity.settings.rules import shown

__all__ = ["UnwritableError", "decode", "encode"]

_LENGTH_BYTES = 8
_ALIGNMENT = 64
_MOST_NESTED = 100
_MOST_JSON_NESTED = 4 * _MOST_NESTED  # one container of Python is up to three of JSON
_MOST_DIMENSIONS = 64  # numpy's limit
_LEAST_PACKED = 33  # a shorter list of ints is as cheap in the JSON

_JSON = json.JSONEncoder(ensure_ascii=True, check_circular=False, allow_nan=False, separators=(",", ":"))
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[{\]}]', re.DOTALL)
_FACTORIES: dict[Any, str | None] = {None: None} | {kind: kind.__name__ for kind in (int, float, list, dict, set, str)}
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_TENSOR_DTYPES = {name: dtype for name, dtype in _DTYPES.items() if not name.startswith("torch.q")}  # quantized ones
_NUMPY_NAME = re.compile(r"[<>|](?:[biufc]\d{1,2}|[lLqQgG]|[US]\d{1,9})", re.ASCII)
_NUMPY_KINDS = "biufcUS"
_NUMPY_NUMBERS = {np.dtype(code).type for code in np.typecodes["All"] if np.dtype(code).kind in "biufc"}


class UnwritableError(Exception):
    """A value has a part that :func:`encode` cannot write.

    Args:
        where: Place of the part, in Python's notation from the root on: ``['callbacks']['a'][3]``. A key of a dict and
            a member of a set have the place of their container.
        value: The part.
        reason: The reason, unless it is the type of the part.

    Attributes:
        where: As above.
        type_name: Name of the part's type, with its module unless that is ``builtins``.
    """

    def __init__(self, where: str, value: object, reason: str = "") -> None:
        super().__init__(where, reason)
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        self.where = where
        self.type_name = module + kind.__qualname__
        self.reason = reason

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
        return _decoded(memoryview(content))
    except Exception as error:  # torch and numpy raise many kinds of errors for invalid values
        raise ValueError(f"The content is damaged or not of this format: {error}") from error


class _Writer:
    """Turns values into values for the JSON encoder, and collects the bytes of arrays."""

    def __init__(self) -> None:
        self.arrays: list[bytes] = []
        self._open: set[int] = set()

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind is str and value.isascii():
            return value
        written = _WRITTEN.get(kind)
        if written is None:
            raise UnwritableError("", value)
        return written(self, value)

    def elements(self, container: Any, step: Callable[[int], str]) -> list[Any]:
        self._enter(container)
        written: list[Any] = []
        try:
            for element in container:
                written.append(self.write(element))
        except UnwritableError as error:
            error.where = step(len(written)) + error.where
            raise
        self._open.discard(id(container))
        return written

    def mapping(self, container: Mapping[Any, Any], step: Callable[[Any], str]) -> Any:
        self._enter(container)
        are_names = all(type(key) is str and key.isascii() for key in container)
        keys = list(container) if are_names else [self.write(key) for key in container]
        values: list[Any] = []
        try:
            for value in container.values():
                values.append(self.write(value))
        except UnwritableError as error:
            error.where = step(list(container)[len(values)]) + error.where
            raise
        self._open.discard(id(container))
        return dict(zip(keys, values, strict=True)) if are_names else [keys, values]

    def _enter(self, container: object) -> None:
        if id(container) in self._open:
            raise UnwritableError("", container, "and contains itself")
        if len(self._open) == _MOST_NESTED:
            raise UnwritableError("", container, f"inside of more than {_MOST_NESTED} others")
        self._open.add(id(container))


def _subscript(key: Any) -> str:
    return f"[{shown(key)}]"


def _attribute(name: Any) -> str:
    return f".{name}"


def _no_step(key: object) -> str:
    return ""


def _write_plain(writer: _Writer, value: Any) -> Any:
    return value


def _write_int(writer: _Writer, value: int) -> Any:
    # Python refuses to format or parse decimal integers of many digits.
    return value if value.bit_length() < 1000 else {"int": hex(value)}


def _write_float(writer: _Writer, value: float) -> Any:
    return value if math.isfinite(value) else {"float": struct.pack("<d", value).hex()}


def _write_complex(writer: _Writer, value: complex) -> Any:
    return {"complex": struct.pack("<dd", value.real, value.imag).hex()}


def _write_str(writer: _Writer, value: str) -> Any:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # JSON would join two lone surrogates to one character
        return {"str": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _write_bytes(writer: _Writer, value: bytes | bytearray) -> Any:
    writer.arrays.append(bytes(value))
    return {type(value).__name__: len(value)}


def _write_sequence(writer: _Writer, value: list[Any] | tuple[Any, ...]) -> Any:
    if len(value) >= _LEAST_PACKED and set(map(type, value)) == {int}:
        try:
            writer.arrays.append(np.array(value, "<i8").tobytes())
        except OverflowError:
            pass
        else:
            return {f"{type(value).__name__} of int64": len(value)}
    written = writer.elements(value, _subscript)
    return written if type(value) is list else {"tuple": written}


def _write_members(writer: _Writer, value: Any) -> Any:
    return {type(value).__name__: writer.elements(value, _no_step)}


def _write_size(writer: _Writer, value: torch.Size) -> Any:
    return {"Size": list(value)}


def _write_deque(writer: _Writer, value: deque[Any]) -> Any:
    return {"deque": [value.maxlen, writer.elements(value, _subscript)]}


def _write_dict(writer: _Writer, value: dict[Any, Any]) -> Any:
    return {"dict": writer.mapping(value, _subscript)}


def _write_ordered_dict(writer: _Writer, value: OrderedDict[Any, Any]) -> Any:
    attributes = vars(value)
    if attributes.keys() - {"_metadata"}:  # Module.state_dict keeps versions there
        raise UnwritableError("", value, "with attributes")
    return {"OrderedDict": [writer.mapping(value, _subscript), writer.mapping(attributes, _attribute)]}


def _write_counter(writer: _Writer, value: Counter[Any]) -> Any:
    if vars(value):
        raise UnwritableError("", value, "with attributes")
    return {"Counter": writer.mapping(value, _subscript)}


def _write_default_dict(writer: _Writer, value: defaultdict[Any, Any]) -> Any:
    factory: Any = value.default_factory
    if not any(factory is known for known in _FACTORIES):
        raise UnwritableError("", value, "with a default_factory of the user's")
    return {"defaultdict": [_FACTORIES[factory], writer.mapping(value, _subscript)]}


def _write_namespace(writer: _Writer, value: argparse.Namespace) -> Any:
    return {"Namespace": writer.mapping(vars(value), _attribute)}


def _write_tensor(writer: _Writer, value: torch.Tensor) -> Any:
    return {"Tensor": _tensor_form(writer, value)}


def _write_parameter(writer: _Writer, value: torch.nn.Parameter) -> Any:
    return {"Parameter": [*_tensor_form(writer, value), value.requires_grad]}


def _tensor_form(writer: _Writer, tensor: torch.Tensor) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized or tensor.is_meta:
        raise UnwritableError("", tensor, "and is sparse, nested, quantized or without data")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise UnwritableError("", tensor, f"of more than {_MOST_DIMENSIONS} dimensions")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    writer.arrays.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    return [str(tensor.dtype), list(tensor.shape)]


def _write_array(writer: _Writer, value: np.ndarray[Any, Any]) -> Any:
    name = _numpy_name(value, value.dtype)
    if value.dtype.itemsize == 0:
        raise UnwritableError("", value, "of items without bytes")
    writer.arrays.append(value.tobytes())
    return {"ndarray": [name, list(value.shape)]}


def _write_numpy_number(writer: _Writer, value: np.generic) -> Any:
    return {"numpy": [_numpy_name(value, value.dtype), value.tobytes().hex()]}


def _write_numpy_str(writer: _Writer, value: np.str_) -> Any:
    return {"str_": writer.write(str(value))}


def _write_numpy_bytes(writer: _Writer, value: np.bytes_) -> Any:
    return {"bytes_": bytes(value).hex()}


def _write_numpy_dtype(writer: _Writer, value: np.dtype[Any]) -> Any:
    return {"numpy dtype": _numpy_name(value, value)}


def _numpy_name(value: object, dtype: np.dtype[Any]) -> str:
    if dtype.kind not in _NUMPY_KINDS or dtype.metadata is not None:
        raise UnwritableError("", value, f"with the dtype {dtype}")
    if np.dtype(dtype.str).char == dtype.char:
        return dtype.str
    return f"{dtype.str[0]}{dtype.char}"  # C has two names for some sizes, and numpy a type for each of them


def _write_name(writer: _Writer, value: torch.dtype | torch.device) -> Any:
    return {type(value).__name__: str(value)}


def _write_path(writer: _Writer, value: pathlib.PurePath) -> Any:
    return {type(value).__name__: writer.write(str(value))}


def _write_date(writer: _Writer, value: datetime.date) -> Any:
    return {"date": value.isoformat()}


def _write_datetime(writer: _Writer, value: datetime.datetime) -> Any:
    if value.tzinfo is not None and not _is_unnamed(value.tzinfo):
        raise UnwritableError("", value, "with another time zone than a fixed offset without a name")
    return {"datetime": [value.isoformat(), value.fold]}


def _is_unnamed(zone: datetime.tzinfo) -> bool:
    return type(zone) is datetime.timezone and zone.tzname(None) == datetime.timezone(zone.utcoffset(None)).tzname(None)


def _write_timedelta(writer: _Writer, value: datetime.timedelta) -> Any:
    return {"timedelta": [value.days, value.seconds, value.microseconds]}


_WRITTEN: dict[type, Callable[[_Writer, Any], Any]] = {
    type(None): _write_plain,
    bool: _write_plain,
    int: _write_int,
    float: _write_float,
    complex: _write_complex,
    str: _write_str,
    bytes: _write_bytes,
    bytearray: _write_bytes,
    list: _write_sequence,
    tuple: _write_sequence,
    set: _write_members,
    frozenset: _write_members,
    dict: _write_dict,
    OrderedDict: _write_ordered_dict,
    Counter: _write_counter,
    defaultdict: _write_default_dict,
    deque: _write_deque,
    argparse.Namespace: _write_namespace,
    torch.Size: _write_size,
    torch.Tensor: _write_tensor,
    torch.nn.Parameter: _write_parameter,
    torch.dtype: _write_name,
    torch.device: _write_name,
    np.ndarray: _write_array,
    np.str_: _write_numpy_str,
    np.bytes_: _write_numpy_bytes,
    pathlib.PosixPath: _write_path,
    pathlib.PurePosixPath: _write_path,
    datetime.date: _write_date,
    datetime.datetime: _write_datetime,
    datetime.timedelta: _write_timedelta,
}
_WRITTEN |= dict.fromkeys(_NUMPY_NUMBERS, _write_numpy_number)
_WRITTEN |= {type(np.dtype(code)): _write_numpy_dtype for code in np.typecodes["All"]}


def _decoded(content: memoryview) -> Any:
    end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
    if not _LENGTH_BYTES < end <= len(content):
        raise ValueError("it is shorter than it says")
    text = str(content[_LENGTH_BYTES:end], "ascii")
    _check_nesting(text)
    reader = _Reader(content, end)
    value = reader.read(json.loads(text, parse_constant=_refuse))
    if reader.position != len(content):
        raise ValueError("it is longer than its arrays")
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _check_nesting(text: str) -> None:
    """Raise ValueError before the JSON module, written in C, recurses too deep."""
    depth = 0
    for token in _TOKEN.finditer(text):
        first = text[token.start()]
        depth += (first in "[{") - (first in "]}")
        if depth > _MOST_JSON_NESTED:
            raise ValueError("it is nested too deep")


class _Reader:
    """Turns parsed JSON back into values, and takes arrays from the content in their order."""

    def __init__(self, content: memoryview, position: int) -> None:
        self._content = content
        self.position = position

    def read(self, form: Any) -> Any:
        if isinstance(form, list):
            return [self.read(element) for element in form]
        if not isinstance(form, dict):
            return form
        ((name, told),) = form.items()
        return _READ[name](self, told)

    def elements(self, forms: Any) -> list[Any]:
        return [self.read(element) for element in _checked(forms, list)]

    def items(self, form: Any) -> Iterable[tuple[Any, Any]]:
        if isinstance(form, dict):
            return [(key, self.read(value)) for key, value in form.items()]
        keys, values = form
        return list(zip(self.elements(keys), self.elements(values), strict=True))

    def take(self, num_bytes: Any) -> memoryview:
        start = self.position + -self.position % _ALIGNMENT
        if not 0 <= _checked(num_bytes, int) <= len(self._content) - start:
            raise ValueError("it ends before its arrays")
        self.position = start + num_bytes
        return self._content[start : self.position]


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"it has {type(value).__name__} in place of {kind.__name__}")
    return value


def _read_ints(reader: _Reader, count: Any) -> list[int]:
    ints: list[int] = np.frombuffer(reader.take(_checked(count, int) * 8), "<i8").tolist()
    return ints


def _read_deque(reader: _Reader, told: Any) -> deque[Any]:
    maxlen, forms = told
    return deque(reader.elements(forms), maxlen)


def _read_ordered_dict(reader: _Reader, told: Any) -> OrderedDict[Any, Any]:
    form, attributes = told
    value = OrderedDict(reader.items(form))
    for name, attribute in reader.items(attributes):
        if name != "_metadata":
            raise ValueError(f"an OrderedDict has the attribute {name!r}")
        value.__dict__[name] = attribute
    return value


def _read_counter(reader: _Reader, told: Any) -> Counter[Any]:
    return Counter(dict(reader.items(told)))


def _read_default_dict(reader: _Reader, told: Any) -> defaultdict[Any, Any]:
    name, form = told
    factories = {known: factory for factory, known in _FACTORIES.items()}
    return defaultdict(factories[name], reader.items(form))


def _read_namespace(reader: _Reader, told: Any) -> argparse.Namespace:
    value = argparse.Namespace()
    vars(value).update((_checked(name, str), attribute) for name, attribute in reader.items(told))
    return value


def _read_tensor(reader: _Reader, told: Any) -> torch.Tensor:
    name, shape = told
    dtype = _TENSOR_DTYPES[name]
    raw = reader.take(_numel(shape) * dtype.itemsize)
    if not raw:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flat = np.frombuffer(raw, np.uint8).copy()
    # A byte above one is not a valid bool: torch's behaviour would be undefined.
    bits = torch.from_numpy(flat != 0 if dtype is torch.bool else flat)
    return bits.view(dtype).reshape(shape)


def _read_parameter(reader: _Reader, told: Any) -> torch.nn.Parameter:
    name, shape, requires_grad = told
    return torch.nn.Parameter(_read_tensor(reader, [name, shape]), requires_grad=_checked(requires_grad, bool))


def _read_array(reader: _Reader, told: Any) -> np.ndarray[Any, Any]:
    name, shape = told
    dtype = _numpy_dtype(name)
    if dtype.itemsize == 0:
        raise ValueError("an array has items without bytes")
    raw = reader.take(_numel(shape) * dtype.itemsize)
    if dtype.kind == "U" and (np.frombuffer(raw, f"{dtype.str[0]}u4") > 0x10FFFF).any():
        raise ValueError("a text has characters that do not exist")
    flat = np.frombuffer(raw, np.uint8) != 0 if dtype.kind == "b" else np.frombuffer(raw, dtype).copy()
    return flat.reshape(shape)


def _read_numpy_number(reader: _Reader, told: Any) -> Any:
    name, raw = told
    dtype = _numpy_dtype(name)
    (number,) = np.frombuffer(bytes.fromhex(raw), dtype)
    return number


def _numpy_dtype(name: Any) -> np.dtype[Any]:
    if not _NUMPY_NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no dtype")
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def _numel(shape: Any) -> int:
    lengths = _checked(shape, list)
    if len(lengths) > _MOST_DIMENSIONS or not all(0 <= _checked(length, int) < 2**63 for length in lengths):
        raise ValueError("an array has no possible shape")
    return math.prod(lengths)


def _read_datetime(reader: _Reader, told: Any) -> datetime.datetime:
    text, fold = told
    return datetime.datetime.fromisoformat(text).replace(fold=fold)


def _read_size(reader: _Reader, told: Any) -> torch.Size:
    return torch.Size([_checked(length, int) for length in _checked(told, list)])


_READ: dict[str, Callable[[_Reader, Any], Any]] = {
    "int": lambda reader, told: int(told, 16),
    "float": lambda reader, told: struct.unpack("<d", bytes.fromhex(told))[0],
    "complex": lambda reader, told: complex(*struct.unpack("<dd", bytes.fromhex(told))),
    "str": lambda reader, told: bytes.fromhex(told).decode("utf-8", "surrogatepass"),
    "bytes": lambda reader, told: bytes(reader.take(told)),
    "bytearray": lambda reader, told: bytearray(reader.take(told)),
    "list of int64": _read_ints,
    "tuple of int64": lambda reader, told: tuple(_read_ints(reader, told)),
    "tuple": lambda reader, told: tuple(reader.elements(told)),
    "set": lambda reader, told: set(reader.elements(told)),
    "frozenset": lambda reader, told: frozenset(reader.elements(told)),
    "dict": lambda reader, told: dict(reader.items(told)),
    "OrderedDict": _read_ordered_dict,
    "Counter": _read_counter,
    "defaultdict": _read_default_dict,
    "deque": _read_deque,
    "Namespace": _read_namespace,
    "Size": _read_size,
    "Tensor": _read_tensor,
    "Parameter": _read_parameter,
    "dtype": lambda reader, told: _DTYPES[told],
    "device": lambda reader, told: torch.device(_checked(told, str)),
    "ndarray": _read_array,
    "numpy": _read_numpy_number,
    "str_": lambda reader, told: np.str_(_checked(reader.read(told), str)),
    "bytes_": lambda reader, told: np.bytes_(bytes.fromhex(told)),
    "numpy dtype": lambda reader, told: _numpy_dtype(told),
    "PosixPath": lambda reader, told: pathlib.PosixPath(_checked(reader.read(told), str)),
    "PurePosixPath": lambda reader, told: pathlib.PurePosixPath(_checked(reader.read(told), str)),
    "date": lambda reader, told: datetime.date.fromisoformat(told),
    "datetime": _read_datetime,
    "timedelta": lambda reader, told: datetime.timedelta(*(_checked(part, int) for part in told)),
}
