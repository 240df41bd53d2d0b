"""What a checkpoint keeps as typed JSON comes back with its types and bits, and damaged bytes are refused."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import enum
import math
import random
import struct
import tracemalloc
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from functools import reduce
from pathlib import PosixPath, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays

from lightning_smartinfinity.resume.typed_json import UnwritableError, decode, encode

SURROGATES = "a\ud83d\ude00\udfff"
UTC = datetime.timezone.utc
EAST = datetime.timezone(datetime.timedelta(hours=2, seconds=1))
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def parts(value: Any) -> Any:
    """Return a value as nested lists that are equal only for equal types and bits."""
    kind, name = type(value), type(value).__qualname__
    if kind is float:
        return [name, struct.pack("<d", value)]
    if kind is complex:
        return [name, struct.pack("<dd", value.real, value.imag)]
    if isinstance(value, torch.Tensor):
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        needs_gradient = kind is torch.nn.Parameter and value.requires_grad  # nothing else keeps it
        return [name, value.dtype, value.shape, needs_gradient, plain.reshape(-1).view(torch.uint8).tolist()]
    if isinstance(value, np.ndarray | np.generic):
        return [name, value.dtype.str, value.dtype.char, value.shape, value.tobytes()]
    if isinstance(value, argparse.Namespace):
        return [name, parts(vars(value))]
    if isinstance(value, dict):
        extra = [getattr(value, "default_factory", None), parts(getattr(value, "_metadata", None))]
        return [name, [[parts(key), parts(element)] for key, element in value.items()], extra]
    if isinstance(value, set | frozenset):
        return [name, sorted((parts(element) for element in value), key=repr)]
    if isinstance(value, list | tuple | deque):
        return [name, [parts(element) for element in value], getattr(value, "maxlen", None)]
    if kind is datetime.datetime:
        return [name, value.isoformat(), value.fold]
    return [name, value]


def again(value: Any) -> Any:
    return decode(encode(value))


def with_metadata() -> OrderedDict[str, Any]:
    return torch.nn.BatchNorm1d(3).state_dict()  # type: ignore[return-value]


SCALARS: list[Any] = [
    *(None, True, False, 0, -1, 2**63, -(2**64), 10**5000, -(3**9000)),
    *(
        0.0,
        -0.0,
        math.nan,
        -math.nan,
        math.inf,
        -math.inf,
        5e-324,
        0.1,
        1e308,
        struct.unpack("<d", b"\1" * 6 + b"\xf0\x7f")[0],
    ),
    *(
        1j,
        complex(math.nan, -0.0),
        "",
        "a",
        "é😀",
        "\ud800",
        SURROGATES,
        '\0\n"\\[{',
        b"",
        b"\0\xff" * 99,
        bytearray(b"abc"),
    ),
    *(PosixPath("/a/é"), PosixPath(), PurePosixPath("b/\udcff"), torch.float32, torch.quint8, torch.device("cuda", 1)),
    *(torch.device("cpu"), torch.device("meta"), np.dtype("f4"), np.dtype(">i2"), np.dtype("U7"), np.dtype("S0")),
    *(np.dtype("q"), np.float32(0.1), np.float64(-0.0), np.int8(-3), np.bool_(True), np.complex64(1j), np.longlong(7)),
    *(np.longdouble(1) / 3, np.str_("é"), np.str_(""), np.str_(SURROGATES), np.bytes_(b"\0a"), np.float16(math.nan)),
    *(datetime.date(2024, 2, 29), datetime.datetime(1, 1, 1), datetime.datetime(2024, 1, 1, 1, 1, 1, 7, UTC, fold=1)),
    *(datetime.datetime(2024, 1, 1, tzinfo=EAST), datetime.timedelta(-5, 7, 3), datetime.timedelta.max),
]
CONTAINERS: list[Any] = [
    *([], (), {}, set(), frozenset(), deque(), OrderedDict(), Counter(), [[]], ((),), {"a": {}}, {"": None}),
    *(
        {1: 2, 1.5: 3, (1, "a"): None, None: 4, b"k": 5, frozenset({1}): 6, "é": 7, SURROGATES: 8},
        {"b": 1, "a": 2},
    ),
    *({True: 1, 2: 2}, {False: 0}, {(): ()}, {"dict": {"tuple": [1]}}, {"keys": [1], "values": [2]}),
    *(
        deque([1, 2], maxlen=2),
        deque([1], maxlen=5),
        deque(maxlen=0),
        OrderedDict(b=1, a=2),
        Counter("abca"),
        Counter({1: -2}),
    ),
    *(defaultdict(None, a=1), defaultdict(list, {3: [1]}), defaultdict(dict), defaultdict(int, x=1), defaultdict(set)),
    *(
        defaultdict(float),
        defaultdict(str),
        torch.Size([2, 3]),
        torch.Size([]),
        argparse.Namespace(lr=0.1, sub={"a": (1,)}),
    ),
    *(
        [*range(100)],
        tuple(range(33)),
        [2**63] * 40,
        [True] * 40,
        [1] * 39 + [True],
        [-(2**63), 2**63 - 1] * 20,
        [1.0] * 50,
    ),
    *([[1]] * 2, reduce(lambda inner, _: OrderedDict({(1,): inner}), range(97), OrderedDict())),
    *({1, "a", (2, 3)}, frozenset({1.5, None}), with_metadata(), random.Random(3).getstate(), np.random.get_state()),
]
ARRAYS: list[Any] = [
    *(
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.arange(10)[::3],
        np.array(5),
        np.empty((0, 3)),
    ),
    *(
        np.array(["a", "éé"]),
        np.array(["a"], ">U3"),
        np.array([b"a", b"bc"]),
        np.array([True, False]),
        np.array([1, 2], ">i4"),
    ),
    *(
        np.array([1j]),
        np.array([1, 2], np.longlong),
        np.array([1], np.longdouble),
        np.array([math.nan], "f2"),
        np.array([], str),
    ),
    *(torch.tensor(3), torch.empty(0), torch.empty(2, 0, 3), torch.arange(12).reshape(3, 4).T, torch.arange(9)[::2]),
    *(
        torch.tensor([True, False]),
        torch.tensor([0.1], requires_grad=True) * 2,
        torch.tensor([1 + 2j]).conj(),
        torch.eye(3)[1].expand(4, 3),
    ),
    *(torch.tensor([1j, 2j]).conj().imag, torch.get_rng_state()),
    *(torch.nn.Parameter(torch.arange(3.0), requires_grad=requires_grad) for requires_grad in (True, False)),
]
DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    *(torch.uint32, torch.int64, torch.uint64, torch.bool),
]


@pytest.mark.parametrize("value", [*SCALARS, *CONTAINERS, *ARRAYS], ids=lambda value: type(value).__name__)
def test_a_value_comes_back(value: Any) -> None:
    """Types, bits and orders are those of the value."""
    assert parts(again(value)) == parts(value) and parts(again({"a": [value]})) == parts({"a": [value]})


def test_arrays_are_writable_and_own_their_memory() -> None:
    """What is read can be changed in place, which changes nothing else."""
    content = encode([torch.zeros(3), np.zeros(3), np.zeros(2, bool)])
    for array in decode(content):
        array[0] = 1
    assert all(not array.any() for array in decode(content))


KEYS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary())
TEXT = st.text(st.characters(exclude_categories=()))
LEAVES = st.one_of(
    *(KEYS, st.floats(), st.complex_numbers(), TEXT, st.dates(), st.datetimes(), st.timedeltas()),
    arrays.arrays(
        st.one_of(arrays.scalar_dtypes().filter(lambda dtype: dtype.kind in "biufc")), arrays.array_shapes(min_side=0)
    ),
    st.lists(st.integers(-(2**70), 2**70), min_size=30, max_size=40),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keyed = st.dictionaries(st.one_of(KEYS, st.tuples(KEYS, KEYS)), inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return st.one_of(
        *(
            lists,
            lists.map(tuple),
            st.builds(deque, lists, st.none() | st.integers(0, 9)),
            keyed,
            keyed.map(OrderedDict),
        ),
        keyed.map(Counter),
        keyed.map(lambda value: defaultdict(list, value)),
        st.dictionaries(st.sampled_from(["lr", "é", "a b"]), inner).map(lambda value: argparse.Namespace(**value)),
        st.sets(KEYS, max_size=4) | st.frozensets(KEYS, max_size=4),
    )


VALUES = st.recursive(LEAVES, nested, max_leaves=12)


@given(VALUES)
@settings(max_examples=300)
def test_any_value_comes_back(value: Any) -> None:
    """A round trip keeps every type and every bit."""
    assert parts(again(value)) == parts(value)


@given(arrays.arrays(np.uint8, st.integers(0, 40)), st.sampled_from(DTYPES))
@settings(max_examples=300)
def test_any_bits_of_a_tensor_come_back(raw: Any, dtype: torch.dtype) -> None:
    """The bits of NaNs and denormals survive, too."""
    raw = raw[: len(raw) // dtype.itemsize * dtype.itemsize]
    bits = torch.tensor((raw % 2 if dtype is torch.bool else raw).tolist(), dtype=torch.uint8).view(dtype)
    value = bits[0] if len(bits) == 1 else bits.reshape(-1, 1)
    found = again(value)
    assert parts(found) == parts(value) and found.is_contiguous() and not found.requires_grad


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 1


class Point(NamedTuple):
    x: int


class OwnList(list):  # type: ignore[type-arg]
    pass


class OwnTensor(torch.Tensor):
    pass


def cyclic() -> list[Any]:
    value: list[Any] = [1]
    value.append(value)
    return value


def of_attributes(kind: Callable[[], Any]) -> Any:
    value = kind()
    value.own = 1
    return value


HERE = __name__
UNWRITABLE: dict[str, tuple[Any, str]] = {
    "function": (parts, "function"),
    "class": (int, "type"),
    "object": (object(), "object"),
    "enum": (Color.RED, f"{HERE}.Color"),
    "int enum": (Level.HIGH, f"{HERE}.Level"),
    "named tuple": (Point(1), f"{HERE}.Point"),
    "subclass": (OwnList(), f"{HERE}.OwnList"),
    "tensor subclass": (torch.zeros(2).as_subclass(OwnTensor), f"{HERE}.OwnTensor"),
    "range": (range(3), "range"),
    "sparse": (torch.eye(3).to_sparse(), "torch.Tensor"),
    "meta": (torch.empty(3, device="meta"), "torch.Tensor"),
    "objects": (np.array([1, "a"], object), "numpy.ndarray"),
    "records": (np.zeros(2, "i4,f4"), "numpy.ndarray"),
    "object dtype": (np.dtype(object), "numpy.dtypes.ObjectDType"),
    "times": (np.array(["2024-01-01"], "M8[D]"), "numpy.ndarray"),
    "time scalar": (np.datetime64("2024-01-01"), "numpy.datetime64"),
    "masked": (np.ma.array([1]), "numpy.ma.MaskedArray"),
    "no bytes": (np.zeros(3, "V0"), "numpy.ndarray"),
    "generator": (torch.Generator(), "torch._C.Generator"),
    "factory": (defaultdict(parts), "collections.defaultdict"),
    "ordered": (of_attributes(OrderedDict), "collections.OrderedDict"),
    "counter": (of_attributes(Counter), "collections.Counter"),
    "zone": (datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone(datetime.timedelta(0), "Z")), "datetime.datetime"),
}


@pytest.mark.parametrize("name", UNWRITABLE)
def test_the_place_and_type_of_what_cannot_be_written_are_told(name: str) -> None:
    """The error has the path from the root, through every container, and the type."""
    value, kind = UNWRITABLE[name]
    for root, where in (
        (value, ""),
        ({"callbacks": {"a": [1, 2, 3, value]}}, "['callbacks']['a'][3]"),
        ({("x", 1): (value,)}, "[('x', 1)][0]"),
        ({"é": deque([0, value])}, "['é'][1]"),
        ({"ns": argparse.Namespace(opt=OrderedDict(k=value))}, "['ns'].opt['k']"),
        ([defaultdict(list, {2: value}), 1], "[0][2]"),
    ):
        with pytest.raises(UnwritableError) as caught:
            encode(root)
        assert (caught.value.where, caught.value.type_name) == (where, kind) and kind in str(caught.value)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ([{Color.RED: 1}], "[0]"),
        ({"s": {Color.RED}}, "['s']"),
        ({"s": frozenset({(1, Color.RED)})}, "['s'][1]"),
        ({"c": cyclic()}, "['c'][1]"),
        (reduce(lambda inner, _: [inner], range(200), []), "[0]" * 100),
    ],
    ids=["key", "set", "tuple in a set", "cycle", "deep"],
)
def test_places_of_keys_members_and_cycles(value: Any, where: str) -> None:
    """Keys and members have the place of their container. A cycle is found where it closes."""
    with pytest.raises(UnwritableError) as caught:
        encode(value)
    assert caught.value.where == where


def of_text(text: str, after: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode("latin-1") + after


HOSTILE = [
    *(
        b"",
        b"\0" * 8,
        b"\xff" * 8,
        b"\xff" * 100,
        (2**63).to_bytes(8, "little") + b"1",
        of_text("1")[:-1],
        of_text("1", b"x"),
    ),
    *(of_text("[" * 100_000), of_text('{"tuple":' * 100_000), of_text('"' + "\\" * 100_001), of_text('"\\"' * 50_000)),
    *map(
        of_text,
        [
            *(
                "",
                "{}",
                "NaN",
                "Infinity",
                '{"a":1}',
                '{"tuple":1,"list":2}',
                "[1",
                "é",
                "1" * 5000,
                '{"tuple":{"tuple":[]}}',
            ),
            *(
                '{"bytes":9}',
                '{"bytes":-1}',
                '{"bytes":true}',
                '{"bytes":1e9}',
                '{"bytes":1e999}',
                '{"list of int64":-5}',
            ),
            *(
                '{"list of int64":9999999999999}',
                '{"Tensor":["torch.float32",[99999999999]]}',
                '{"Tensor":["os.system",[1]]}',
            ),
            *(
                '{"Tensor":["torch.float32",[-1]]}',
                '{"Tensor":["torch.float32",[true]]}',
                '{"Tensor":["torch.float32",[1.5]]}',
            ),
            '{"Tensor":["torch.float32",[0,4611686018427387904,4611686018427387904]]}',
            '{"Tensor":["torch.float32",[0,99999999999999999999]]}',
            '{"Tensor":["torch.qint8",[0]]}',
            '{"Tensor":["torch.float32",' + str([10**4000] * 2) + "]}",
            '{"Tensor":["torch.float32",' + str([1] * 1000) + "]}",
            '{"Parameter":["torch.int64",[0],true]}',
            '{"Parameter":["torch.float32",[0],1]}',
            *(
                '{"ndarray":["O",[0]]}',
                '{"ndarray":["|O8",[0]]}',
                '{"ndarray":["<U0",[999999999]]}',
                '{"ndarray":["<i4,<i4",[0]]}',
            ),
            *(
                '{"ndarray":["<U999999999",[999999999]]}',
                '{"ndarray":["<f8",[0,9223372036854775807,9]]}',
                '{"ndarray":["<f3",[0]]}',
            ),
            *('{"numpy":["<f8","00"]}', '{"numpy":["<f8","00000000000000000000000000000000"]}', '{"numpy":["<f8",5]}'),
            *(
                '{"numpy dtype":["<f8"]}',
                '{"numpy dtype":"|O"}',
                '{"dtype":"torch.nn"}',
                '{"device":"x"}',
                '{"device":1}',
            ),
            *(
                '{"dict":[[1],[1,2]]}',
                '{"dict":[[[]],[1]]}',
                '{"dict":5}',
                '{"set":[[1]]}',
                '{"deque":[-1,[]]}',
                '{"deque":[1e9,[]]}',
            ),
            *(
                '{"defaultdict":["eval",{}]}',
                '{"OrderedDict":[{},{"keys":1}]}',
                '{"Namespace":[[1],[1]]}',
                '{"Size":["a"]}',
            ),
            *('{"int":"zz"}', '{"int":5}', '{"float":"00"}', '{"complex":"00"}', '{"str":"ff"}'),
            *(
                '{"date":"x"}',
                '{"datetime":["2024-01-01",2]}',
                '{"timedelta":[9999999999,0,0]}',
                '{"timedelta":[1,2,3,4,5,6,7,8]}',
            ),
            *('{"PosixPath":1}', '{"str_":1}', '{"Counter":[1]}', '{"tuple of int64":null}', '{"list":[]}'),
        ],
    ),
]


@pytest.mark.parametrize("content", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_bytes_are_refused(content: bytes) -> None:
    """What no writer wrote raises ValueError, and takes no more memory than a multiple of its length."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="damaged or not of this format"):
            decode(content)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000 + 100 * len(content)
    finally:
        tracemalloc.stop()


VALID = [encode([*SCALARS]), encode([*CONTAINERS]), encode([*ARRAYS]), encode({"a": [1, {"b": torch.ones(3)}]})]


@given(st.sampled_from(VALID), st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=5), st.data())
@settings(max_examples=500)
def test_damaged_bytes_raise_value_errors_only(
    content: bytes, changes: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Changed bytes are refused or read as another value; cut bytes are refused."""
    damaged = bytearray(content)
    head = int.from_bytes(content[:8], "little") + 8
    for place, byte in changes:
        damaged[place % head] = byte
    damaged = damaged[: data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))]
    try:
        decode(bytes(damaged))
        assert changes or len(damaged) == len(content), "cut bytes were read"
    except ValueError as error:
        assert "damaged or not of this format" in str(error)


@given(st.text('[]{}":,0123456789-eE.\\ntuple', max_size=40), st.sampled_from([b"", b"\0" * 64]))
def test_any_json_raises_value_errors_only(text: str, after: bytes) -> None:
    """Random text in place of the JSON is refused or read."""
    with contextlib.suppress(ValueError):
        decode(of_text(text, after))


def test_text_that_does_not_exist_and_bools_above_one() -> None:
    """A text array with impossible characters is refused. A bool with the byte 2 is read as True."""
    text = encode(np.array(["a"]))
    with pytest.raises(ValueError, match="characters"):
        decode(text[:-4] + b"\xff\xff\xff\x7f")
    for value in (torch.tensor([True]), np.array([True])):
        assert parts(decode(encode(value)[:-1] + b"\2")) == parts(value)
