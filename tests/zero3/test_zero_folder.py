"""Weights are read from the files of any number of processes; files name no code to run unless the user consents."""

from __future__ import annotations

import argparse
import collections
import datetime
import os
import re
import warnings
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from queue import SimpleQueue
from threading import Event
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_smartinfinity.errors import CheckpointError, ConfigError
from lightning_smartinfinity.zero3.checkpoints.formats import found_checkpoint, saved_weights, zero_folder
from lightning_smartinfinity.zero3.checkpoints.formats.block_checksums import SavedArray
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint, tagged_folder
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
from lightning_smartinfinity.zero3.checkpoints.formats.saved_weights import DAMAGE
from lightning_smartinfinity.zero3.checkpoints.formats.tensor_file import TensorFile, room_for, saved_with_room
from lightning_smartinfinity.zero3.checkpoints.formats.trust import (
    load_file,
    load_without_memory,
    loading_policy,
    warn_of_types,
)
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.checkpoints.load.weight_loading import saved_names
from tests.helpers.assertions import refused
from tests.helpers.hostile import Hostile, executed
from tests.helpers.universal import save_of_two
from tests.helpers.waiting import LIMIT

SHAPES = {"one": torch.Size([1]), "three": torch.Size([3]), "many": torch.Size([5, 7]), "even": torch.Size([2, 6])}
FROZEN = {"base": torch.Size([11])}


def values_of(name: str) -> torch.Tensor:
    return torch.arange({**SHAPES, **FROZEN}[name].numel(), dtype=torch.float32) + 16 * len(name)


def slice_of(name: str, rank: int, world_size: int) -> torch.Tensor:
    """Cut and pad as ZeRO-3 does, stated independently; the padding is NaN and must never be read."""
    values = values_of(name)
    numel = (len(values) + world_size - 1) // world_size
    padded = torch.cat([values, torch.full((numel * world_size - len(values),), torch.nan)])
    return padded[rank * numel : (rank + 1) * numel].clone()


def save(folder: Path, world_size: int) -> None:
    """Write the files of a ZeRO-3 checkpoint with two sub-groups, whose border lies within a parameter."""
    for rank in range(world_size):
        flat = torch.cat([slice_of(name, rank, world_size) for name in SHAPES])
        torch.save(
            {
                "param_shapes": [{n: SHAPES[n] for n in ("one", "three")}, {n: SHAPES[n] for n in ("many", "even")}],
                "frozen_param_shapes": FROZEN,
                "frozen_param_fragments": {name: slice_of(name, rank, world_size).bfloat16() for name in FROZEN},
                "shared_params": {},
                "dp_world_size": world_size,
            },
            folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt",
        )
        state = {"partition_count": world_size, "fp32_flat_groups": [flat[:4].clone(), flat[4:].clone()]}
        torch.save({"optimizer_state_dict": state}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def read(folder: Path, rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return the slices of one of so many processes; elements that nobody reads are NaN."""
    wanted, slices = {}, {}
    for name in [*SHAPES, *FROZEN]:
        numel = len(values_of(name))
        per_rank = -(-numel // world_size)
        wanted[name] = range(min(rank * per_rank, numel), min((rank + 1) * per_rank, numel))
        slices[name] = torch.full((len(wanted[name]),), torch.nan)

    def put(name: str, begin: int, values: torch.Tensor) -> None:
        at = begin - wanted[name].start
        assert slices[name][at : at + len(values)].isnan().all(), "read twice"
        slices[name][at : at + len(values)] = values

    weights = ZeroFolder(folder, rank=rank, world_size=world_size)
    weights.require_whole()
    weights.read_masters(wanted, put)
    weights.read_frozen(wanted, put)
    return slices


@pytest.mark.parametrize(("num_saved", "window"), [(1, 3), (2, 1 << 22), (3, 3), (3, 1 << 22), (12, 3)])
def test_all_slices_together_are_the_parameters(
    num_saved: int, window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the windows, each element is read once, by the process that keeps it."""
    monkeypatch.setattr(saved_weights, "WINDOW_NUMEL", window)
    save(tmp_path, num_saved)
    for world_size in (1, 2, 3, 5):
        slices = [read(tmp_path, rank, world_size) for rank in range(world_size)]
        for name in [*SHAPES, *FROZEN]:
            assert torch.equal(torch.cat([of_rank[name] for of_rank in slices]), values_of(name)), (name, world_size)


def test_a_process_reads_its_own_file_alone(tmp_path: Path) -> None:
    """If as many processes saved the checkpoint, a process needs nothing of another's file."""
    save(tmp_path, 2)
    (tmp_path / "zero_pp_rank_1_mp_rank_00_optim_states.pt").write_bytes(b"")
    read(tmp_path, 0, 2)


@pytest.mark.parametrize(
    "tag", ["../other", "/tmp", "a/b", "..", ".", "", " \n", "a\0b", "\ud800", "x" * 256], ids=lambda tag: repr(tag[:9])
)
def test_latest_names_no_folder_elsewhere(tag: str, tmp_path: Path) -> None:
    """``latest`` names a folder beside it, or the checkpoint is refused before anything is looked at."""
    (tmp_path / "mine" / "a" / "b").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    save(tmp_path / "other", 1)
    (tmp_path / "mine" / "latest").write_bytes(tag.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=r"latest names|it is not a ZeRO-3 checkpoint"):
        tagged_folder(tmp_path / "mine")


ARRAYS = {"exp_avg": 0.25, "exp_avg_sq": 0.5}
LARGE = OrderedDict(large=torch.Size([3, 100_001])), OrderedDict(one=torch.Size([1]), small=torch.Size([7]))


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_the_arrays_of_a_training_are_read_in_blocks_and_no_more_than_they_must(
    world_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each element goes to the process that keeps it; all processes together read the checkpoint about twice.

    They share one pass that verifies it. Then each reads its own elements, rounded up to blocks of 65536.
    """
    monkeypatch.setattr(zero_folder, "WINDOW_NUMEL", 1 << 16)
    monkeypatch.setattr(saved_weights, "WINDOW_NUMEL", 1 << 16)
    reads: list[int] = []
    read_at = TensorFile.read_at

    def counting(self: TensorFile, offset: int, content: memoryview) -> None:
        reads.append(content.nbytes)
        read_at(self, offset, content)

    monkeypatch.setattr(TensorFile, "read_at", counting)
    whole = {
        name: torch.arange(shape.numel(), dtype=torch.float32) + 1000 * len(name)
        for shapes in LARGE
        for name, shape in shapes.items()
    }
    folder = save_of_two(tmp_path / "two.ckpt", LARGE, whole, ARRAYS) / "checkpoint"
    ranks = [ZeroFolder(folder, rank=rank, world_size=world_size) for rank in range(world_size)]
    checksums: dict[SavedArray, Sequence[int]] = {}
    for saved in ranks:
        saved.check_states()
        checksums.update(saved.check_arrays(["fp32", *ARRAYS]))
    nbytes = 4 * sum(values.numel() for values in whole.values()) * (1 + len(ARRAYS))
    assert nbytes <= sum(reads) < 1.01 * nbytes
    for saved in ranks:
        saved.begin_reading(checksums)
    for name, values in whole.items():
        for array, offset in {"fp32": 0.0, **ARRAYS}.items():
            numel = -(-len(values) // world_size)
            parts = [np.empty(max(0, min(numel, len(values) - rank * numel)), np.float32) for rank in range(world_size)]
            for rank, (saved, part) in enumerate(zip(ranks, parts, strict=True)):
                for begin in range(0, len(part), 70_000):  # as windows cut it
                    saved.read(name, array, rank * numel + begin, part[begin : begin + 70_000])
            assert torch.equal(torch.from_numpy(np.concatenate(parts)), values + offset), (name, array)
    rounding = 4 * 2 * 65536 * (1 + len(ARRAYS)) * (1 + world_size)
    assert sum(reads) < 2.01 * nbytes + rounding and max(reads) <= 4 * 65536
    for saved in ranks:
        saved.close()


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("optim", {"fp32_flat_groups": [torch.empty(0)]}, "NVMe: masters are not in it"),
        ("optim", {"fp32_flat_groups": [torch.zeros(9)]}, "holds 9 elements of 1 processes where 51 elements"),
        ("optim", {"fp32_flat_groups": [torch.zeros(51, dtype=torch.float16)]}, "float32"),
        ("optim", {"partition_count": 2}, "51 elements of 2 processes"),
        ("optim", {"smart_infinity": {"save_id": "b"}}, "different saves"),
        ("model", {"param_shapes": [{"one": "1"}]}, "says that 'one' has the shape"),
        ("model", {"frozen_param_shapes": {"base": None}}, "says that 'base' has the shape"),
    ],
)
def test_files_that_do_not_belong_together(kind: str, changes: dict[str, object], named: str, tmp_path: Path) -> None:
    """The error says what is wrong, names the parameter, and gives a remedy."""
    save(tmp_path, 1)
    for file in tmp_path.iterdir():
        content = torch.load(file, weights_only=False)
        if file.name.endswith("model_states.pt"):
            content["smart_infinity_save"] = "a"
        if kind in file.name:
            content.get("optimizer_state_dict", content).update(changes)
        torch.save(content, file)
    with refused(CheckpointError, match=named):
        read(tmp_path, 0, 1)


# ---- what goes wrong while a checkpoint folder is read becomes an error that names it


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("damaged"), KeyError("module")])
def test_a_damaged_file(error: Exception, tmp_path: Path) -> None:
    """Any error while reading becomes one error that names the folder and the cause. Our own say more, and pass."""
    with pytest.raises(CheckpointError, match=f"{tmp_path.name}.*{type(error).__name__}"), reading_checkpoint(tmp_path):
        raise error
    with pytest.raises(ConfigError, match="mine"), reading_checkpoint(tmp_path):
        raise ConfigError("mine", "Do.")


def test_values_that_a_hook_computes() -> None:
    """A hook that computes values is refused, since it gets only names; the error names the parameter and the file."""

    def join(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
        state["weight"] = torch.cat([state.pop("first"), state.pop("second")])

    module = torch.nn.Linear(2, 2)
    module.register_load_state_dict_pre_hook(join)
    with pytest.raises(CheckpointError, match=r"Linear computes 'weight' of what there holds"):
        saved_names(module, ["first", "second"], {}, Path("there"))


# ---- files name no code to run unless the user consents; what this package writes, arrays and dates need none


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
    assert {file.name for file in PACKAGE.rglob("*.py") if "FakeTensorMode(" in file.read_text()} == {"fake_tensors.py"}


@pytest.mark.parametrize("load", [load_file, load_without_memory])
def test_a_hostile_file(load: Any, tmp_path: Path) -> None:
    """Nothing in it is called. The error names the file, the types and what to write; then it is called."""
    torch.save({"weight": torch.ones(2), "more": Hostile(tmp_path)}, tmp_path / "file.pt")
    holds_more, remedy = rf"file\.pt holds more .*: {Hostile.CALLS}\. ", "pass weights_only=False to it;"
    with refused(CheckpointError, match=holds_more, remedy="weights_only=False where you load it"):
        load(tmp_path / "file.pt")
    with loading_policy(None, consent="weights_only=False to it"), refused(CheckpointError, remedy=remedy):
        load(tmp_path / "file.pt")
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
    with warnings.catch_warnings(action="error"):
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

NUMPY_ARRAYS = {
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


@pytest.mark.parametrize("kind", NUMPY_ARRAYS)
def test_an_array_comes_back(kind: str, tmp_path: Path) -> None:
    """It has its type, dtype, order and values, wherever it lies, and can be written."""
    array = NUMPY_ARRAYS[kind]
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
    with warnings.catch_warnings(action="error"):
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
    with torch.serialization.safe_globals([multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.ObjectDType]):
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
STATES = {
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


def array(*state: object) -> Lie:
    return Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b"), state)


def array_of(text: object, state: object) -> Lie:
    """Return an array that says to have a dtype of this name, with this state."""
    return array(1, (2,), Lie(np.dtype, (text, False, True), *([] if state is None else [state])), False, POINTERS)


LIES = {
    **{kind: array(*state) for kind, state in STATES.items()},
    **{kind: array_of(*dtype) for kind, dtype in DTYPES.items()},
    "an array that never got its content": Lie(multiarray._reconstruct, (np.ndarray, (0,), b"b")),
    "a scalar with a number that is no character": Lie(multiarray.scalar, (TEXT["<"], b"\xff" * 8)),
}


@pytest.mark.parametrize("kind", LIES)
def test_what_is_no_array(kind: str, tmp_path: Path) -> None:
    """No bytes of the file become pointers: the load ends with an error that readers of checkpoints know."""
    torch.save({"mine": LIES[kind]}, tmp_path / "file.pt")
    with pytest.raises((*DAMAGE, CheckpointError)):
        load_file(tmp_path / "file.pt")


def test_flags_of_a_file_are_not_used(tmp_path: Path) -> None:
    """A dtype of numbers that claims to hold references is one of numbers."""
    torch.save([array_of("f8", (3, "<", None, None, None, -1, -1, 63))], tmp_path / "file.pt")
    (loaded,) = load_file(tmp_path / "file.pt")
    assert loaded.dtype.flags == np.dtype("f8").flags and loaded.tobytes() == POINTERS


def test_another_checkpoint_on_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that have chosen different checkpoints are told which, and how the best one is the same on all."""
    seen = [Mock(folder=Path(f"/saved/step={step}.ckpt/checkpoint")) for step in (6, 6, 3)]
    monkeypatch.setattr(found_checkpoint.dist, "get_rank", lambda: 0)
    found_checkpoint._require_one_name(seen[:2])
    with pytest.raises(CheckpointError, match=r"Rank 0 loads .*step=6.ckpt, and rank 2 loads .*step=3.*sync_dist=True"):
        found_checkpoint._require_one_name(seen)
