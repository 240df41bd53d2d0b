"""Files name no code to run unless the user consents; what this package writes needs no consent."""

from __future__ import annotations

import collections
import os
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.client_state import loss_scaler_of, numbers_of
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
    found = {name for name, text in code.items() if call.search(text)}
    assert found == {"trust.py"}


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
    assert type(loaded) is type(scaler)
    assert vars(loaded) == vars(scaler)
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
