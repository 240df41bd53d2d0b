"""Files name no code to run unless the user consents; what this package writes, arrays and dates need none."""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import room_for, saved_with_room
from lightning_smartinfinity.zero3.checkpoints.formats.trust import (
    load_file,
    load_without_memory,
    loading_policy,
    warn_of_types,
)
from tests.helpers.hostile import Hostile, executed
from tests.helpers.waiting import LIMIT

PACKAGE = Path(__file__).parents[2] / "lightning_smartinfinity"


class Ours:
    """A class that nobody has to trust."""


class Others:
    """Another one."""


def test_one_module_loads_pickles() -> None:
    """Only the loading policy calls torch.load or unpickles."""
    call = re.compile(r"torch\.load\(|pickle\.loads?\(|np\.load\(|allow_pickle")
    code = {file.name: re.sub(r"#.*", "", file.read_text()) for file in PACKAGE.rglob("*.py")}
    assert {name for name, text in code.items() if call.search(text)} == {"trust.py"}


def test_no_load_leaves_entries_in_the_cache_of_torch(tmp_path: Path) -> None:
    """Loads and saves without memory leave none in the cache that all fake modes share, which is never emptied."""
    before = set(FakeTensorMode.cache)
    for numel in (3, 5):
        torch.save({"a": torch.ones(numel), "b": torch.ones(2, numel)}, tmp_path / "file.pt")
        warn_of_types(tmp_path / "file.pt")
        load_without_memory(tmp_path / "file.pt")
        saved_with_room({"room": room_for(numel)}, tmp_path / "room.pt").close()
    assert set(FakeTensorMode.cache) == before
    made = {file.name for file in PACKAGE.rglob("*.py") if "FakeTensorMode(" in file.read_text()}
    assert made == {"fake_tensors.py"}


@pytest.mark.parametrize("load", [load_file, load_without_memory])
def test_a_hostile_file(load: Any, tmp_path: Path) -> None:
    """Nothing in it is called. The error names the file, the types and what to write; then it is called."""
    torch.save({"weight": torch.ones(2), "more": Hostile(tmp_path)}, tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf"file\.pt holds more .*: {Hostile.CALLS}\. ") as caught:
        load(tmp_path / "file.pt")
    assert "weights_only=False where you load it" in caught.value.remedy
    with loading_policy(None, consent="weights_only=False to it"), pytest.raises(CheckpointError) as caught:
        load(tmp_path / "file.pt")
    assert "pass weights_only=False to it;" in caught.value.remedy
    with pytest.raises(ZeroDivisionError), loading_policy(False, consent=""):
        _ = 1 / 0
    with pytest.raises(CheckpointError):
        load(tmp_path / "file.pt")
    assert not executed(tmp_path), "consent lasts as long as the load for which it was given, also if that fails"
    with loading_policy(False, consent=""):
        load(tmp_path / "file.pt")
    assert executed(tmp_path)


def test_all_types_are_listed(tmp_path: Path) -> None:
    """One error names every type, and types that the user allows alone are loaded."""
    torch.save([Ours(), Others(), collections.OrderedDict(a=1)], tmp_path / "file.pt")
    with pytest.raises(CheckpointError, match=rf": {__name__}\.Others, {__name__}\.Ours\. "):
        load_file(tmp_path / "file.pt")
    with torch.serialization.safe_globals([Ours, Others]):
        assert isinstance(load_file(tmp_path / "file.pt")[0], Ours)


def test_a_save_warns_once_of_types(tmp_path: Path) -> None:
    """Who saves an object of their own is told once that loading it will need consent."""
    torch.save({"plain": 1}, tmp_path / "plain.pt")
    torch.save({"mine": Others()}, tmp_path / "file.pt")
    with pytest.warns(UserWarning, match=rf"{__name__}\.Others\. Loading it will need weights_only=False"):
        warn_of_types(tmp_path / "file.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_types(tmp_path / "file.pt")
        warn_of_types(tmp_path / "plain.pt")


def dynamic() -> DynamicLossScaler:
    return DynamicLossScaler(
        init_scale=2.0**16, scale_window=2, min_scale=1.0, delayed_shift=2, consecutive_hysteresis=True
    )


@pytest.mark.parametrize("make", [dynamic, lambda: LossScaler(128.0)], ids=["dynamic", "static"])
def test_a_loss_scaler_becomes_numbers_and_back(make: Any, tmp_path: Path) -> None:
    """All that DeepSpeed's object holds comes back, by a file that names no class."""
    scaler = make()
    scaler.cur_scale /= 4
    torch.save(numbers_of(scaler), tmp_path / "file.pt")
    loaded = loss_scaler_of(load_file(tmp_path / "file.pt"))
    assert type(loaded) is type(scaler) and vars(loaded) == vars(scaler)
    assert loss_scaler_of(scaler) is scaler, "the object that stock DeepSpeed saves"


@pytest.mark.parametrize("saved", [None, 3.0, {}, {"dynamic": False, "cur_scale": "1"}, {"dynamic": True}], ids=str)
def test_what_is_no_loss_scaler(saved: object) -> None:
    """The error is ours."""
    with pytest.raises(CheckpointError, match="in place of the numbers of a loss scaler"):
        loss_scaler_of(saved)


def test_a_file_that_is_larger_than_memory(tmp_path: Path) -> None:
    """It is mapped without asking for as much memory; what is written to a tensor does not change the file."""
    nbytes = 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    file = tmp_path / "file.pt"
    with FakeTensorMode():
        large = torch.empty(nbytes, dtype=torch.uint8)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"large": large}, file)
    assert file.stat().st_size > nbytes and file.stat().st_blocks * 512 < 1 << 20, "it has holes"
    loaded = load_file(file, map_location="cpu", mmap=True)
    assert loaded["large"].numel() == nbytes and loaded["large"][-1] == 0
    loaded["large"][-1] = 7
    assert load_file(file, map_location="cpu", mmap=True)["large"][-1] == 0


def test_loads_that_overlap_leave_torch_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that ends within another one, and one that ends after it, take their patch away together."""
    original, load = torch.UntypedStorage.from_file, torch.load
    begun, ends, loads = SimpleQueue[Path](), {tmp_path / "first": Event(), tmp_path / "second": Event()}, []

    def held(path: Path, **options: Any) -> Any:
        begun.put(path)
        assert ends[path].wait(LIMIT)
        return load(path, **options)

    monkeypatch.setattr(torch, "load", held)
    with ThreadPoolExecutor() as pool:
        for path in ends:
            torch.save(torch.arange(3), path)
            loads.append(pool.submit(load_file, path, mmap=True))
            assert begun.get(timeout=LIMIT) == path
        for end, loading in zip(ends.values(), loads, strict=True):  # the first begun ends first
            end.set()
            loading.result(LIMIT)
    assert torch.UntypedStorage.from_file is original


# ---- arrays of numpy, paths and dates need no consent; what claims to be one of them and is not does no harm


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
    while len(found) == 2:
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
