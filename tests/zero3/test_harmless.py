"""Arrays of numpy, paths and dates need no consent; what claims to be one of them and is not does no harm."""

from __future__ import annotations

import argparse
import datetime
import warnings
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.trust import load_file, load_without_memory, warn_of_types

multiarray: Any = np._core.multiarray

ARRAYS = {
    "float64": np.arange(6.0).reshape(2, 3),
    "column by column": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "every second": np.arange(10)[::2],
    "big-endian": np.arange(3, dtype=">i4"),
    "half": np.ones(3, np.float16),
    "bool": np.array([True, False]),
    "complex": np.array([1j]),
    "text": np.array(["a", "long", "\U0010ffff"]),
    "big-endian text": np.array(["a", "\U0010ffff", ""], ">U2"),
    "no text": np.array([], "U3"),
    "bytes": np.array([b"a", b"bc"]),
    "empty": np.empty((0, 3), np.uint8),
    "without dimensions": np.array(2.5),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_an_array_comes_back(kind: str, tmp_path: Path) -> None:
    """It has its type, dtype, order and values, wherever it lies, and can be written."""
    array = ARRAYS[kind]
    torch.save({"list": [array, (1, array)], "names": argparse.Namespace(mine=array)}, tmp_path / "file.pt")
    for load in (load_file, load_without_memory):
        loaded = load(tmp_path / "file.pt")
        for found in (loaded["list"][0], loaded["list"][1][1], loaded["names"].mine):
            assert type(found) is np.ndarray and found.dtype == array.dtype
            np.testing.assert_array_equal(found, array)
            assert found.flags.writeable and found.flags.f_contiguous == array.copy("A").flags.f_contiguous


def test_scalars_paths_dates_and_dtypes_come_back(tmp_path: Path) -> None:
    """They equal what was saved and have its types, and neither their save nor their load says anything."""
    day = datetime.datetime(2024, 2, 29, 12)
    scalars = [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("\U0010ffff"), np.float64("nan").item()]
    others = [Path("/a/b"), PurePosixPath("c"), day, day.date(), datetime.timedelta(seconds=3)]
    others += [np.dtype("f4"), np.dtype(">i8"), np.dtype("U5")]
    torch.save([*scalars, *others], tmp_path / "file.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_types(tmp_path / "file.pt")
        loaded = load_file(tmp_path / "file.pt")
    assert [*map(type, loaded)] == [*map(type, [*scalars, *others])]
    assert loaded[5:] == others and loaded[:4] == scalars[:4]


def test_lists_and_tuples_that_are_there_more_than_once(tmp_path: Path) -> None:
    """Looking for arrays ends in lists that hold themselves, and looks once into tuples that others share."""
    endless: list[Any] = [np.ones(1)]
    endless.append(endless)
    shared: Any = (np.ones(1),)
    for _ in range(100):
        shared = (shared, shared)
    torch.save({"endless": endless, "shared": shared, "plain": [(1, (2,))] * 2}, tmp_path / "file.pt")
    loaded = load_file(tmp_path / "file.pt")
    assert loaded["endless"][1] is loaded["endless"] and type(loaded["endless"][0]) is np.ndarray
    found = loaded["shared"]
    for _ in range(100):
        assert found[0] is found[1]
        found = found[0]
    assert type(found[0]) is np.ndarray and loaded["plain"] == [(1, (2,)), (1, (2,))]


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (np.array([None, "x"], dtype=object), "numpy.object_"),
        (np.array(["2024-02-29"], dtype="M8[D]"), "numpy.datetime64"),
        (np.zeros(2, dtype=[("a", "f4")]), "numpy.void"),
        (np.random.default_rng(1), "numpy.random._pickle.__generator_ctor"),
    ],
    ids=["objects", "dates", "records", "generator"],
)
def test_other_values_of_numpy_need_consent(value: object, name: str, tmp_path: Path) -> None:
    """The save warns, and the error of the load names the type."""
    torch.save({"mine": value}, tmp_path / "file.pt")
    with pytest.warns(UserWarning, match=rf"{name}.* Loading it will need weights_only=False"):
        warn_of_types(tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"{name}.* To load these types means to run the code"):
        load_file(tmp_path / "file.pt")


def test_types_of_numpy_that_the_user_allows_are_numpys_own(tmp_path: Path) -> None:
    """With add_safe_globals even an array of objects is loaded."""
    torch.save(np.array([None, "x"], dtype=object), tmp_path / "file.pt")
    own = [multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.ObjectDType]
    with torch.serialization.safe_globals(own):
        assert load_file(tmp_path / "file.pt").tolist() == [None, "x"]


class Lie:
    """An object that is saved as something else.

    Args:
        parts: What ``__reduce__`` returns for it.
    """

    def __init__(self, *parts: object) -> None:
        self._parts = parts

    def __reduce__(self) -> Any:
        return self._parts


FLOATS = np.dtype("f8")
TEXT = {order: np.dtype(f"{order}U2") for order in "<>"}
POINTERS = b"\x10" * 16
LIES = {
    "an array that is too short": (1, (3,), FLOATS, False, POINTERS),
    "an array that is too long": (1, (1,), FLOATS, False, POINTERS),
    "a negative length": (1, (-2, -1), FLOATS, False, POINTERS),
    "a length that is no number": (1, ("2",), FLOATS, False, POINTERS),
    "no dtype": (1, (2,), "O", False, POINTERS),
    "no bytes": (1, (2,), FLOATS, False, [None, None]),
    "half a state": (1, (2,)),
    "text with a number that is no character": (1, (1,), TEXT["<"], False, b"a\0\0\0\0\0\x11\0"),
    "big-endian text with a number that is no character": (1, (1,), TEXT[">"], False, b"\0\0\0a\xff\xff\xff\xff"),
}
DTYPES = {
    "numbers with fields of objects": ("f8", (3, "<", None, ("a",), {"a": (np.dtype("f8"), 0)}, 8, 1, 63)),
    "numbers that are arrays of others": ("f8", (3, "<", (np.dtype("f8"), (2,)), None, None, 8, 1, 63)),
    "a byte order that there is not": ("f8", (3, "O", None, None, None, -1, -1, 0)),
    "objects without their flags": ("O8", (3, "|", None, None, None, -1, -1, 0)),
    "a size that there is not": ("f7", None),
    "no name": (8, None),
    "several": ("f8,O", None),
}


OTHERS = {
    "an array that never got its content": Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b")),
    "a scalar with a number that is no character": Lie(multiarray.scalar, (TEXT["<"], b"\xff" * 8)),
}


@pytest.mark.parametrize("kind", [*LIES, *DTYPES, *OTHERS])
def test_what_is_no_array(kind: str, tmp_path: Path) -> None:
    """No bytes of the file become pointers: the load ends with an error that readers of checkpoints know."""
    if kind in OTHERS:
        lie = OTHERS[kind]
    elif kind in LIES:
        lie = Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b"), LIES[kind])
    else:
        text, state = DTYPES[kind]
        dtype = Lie(np.dtype, (text, False, True), *([] if state is None else [state]))
        lie = Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (2,), dtype, False, POINTERS))
    torch.save({"mine": lie}, tmp_path / "file.pt")
    with pytest.raises((*DAMAGE, CheckpointError)):
        load_file(tmp_path / "file.pt")


def test_flags_of_a_file_are_not_used(tmp_path: Path) -> None:
    """A dtype of numbers that claims to hold references is one of numbers."""
    claims = Lie(np.dtype, ("f8", False, True), (3, "<", None, None, None, -1, -1, 63))
    array = Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b"), (1, (2,), claims, False, POINTERS))
    torch.save([array], tmp_path / "file.pt")
    (loaded,) = load_file(tmp_path / "file.pt")
    assert loaded.dtype.flags == np.dtype("f8").flags and loaded.tobytes() == POINTERS
