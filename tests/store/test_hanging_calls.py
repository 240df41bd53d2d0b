"""Set-up, recovery, checkpoints and exports end in time if their disk does not answer, and leave nothing by halves."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import posix
import re
import threading
import time
import traceback
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist

from lightning_smartinfinity import native
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.export.destination import require_room, staged
from lightning_smartinfinity.export.safetensors_file import SafetensorsFile
from lightning_smartinfinity.progress import hidden
from lightning_smartinfinity.store import (
    StateStore,
    TensorStore,
    in_time,
    jobs,
    measure_parameter_space,
    replacement,
    scrub,
)
from lightning_smartinfinity.store.in_time import doing_now, io_limit, unless_idle
from lightning_smartinfinity.store.replacement import flush_tree
from lightning_smartinfinity.store.staging_folder import locked
from lightning_smartinfinity.zero3 import engine, file_systems
from lightning_smartinfinity.zero3.checkpoints import folder_swap, tensor_file
from lightning_smartinfinity.zero3.checkpoints.folder_swap import replacing, restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.scrub import scrub_checkpoint
from lightning_smartinfinity.zero3.checkpoints.trust import ReadWhenUsed, read_mapped
from lightning_smartinfinity.zero3.checkpoints.universal_conversion import convert_checkpoint
from lightning_smartinfinity.zero3.checkpoints.weight_source import TensorSpec
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import save_of_two
from tests.helpers.waiting import LIMIT, await_that
from tests.native.test_interrupt import interrupted
from tests.store.makers import commit_generation, create

SECONDS = 0.2
ERROR = "StorageTimeoutError with path and seconds"
SAID = "the scrub says which file was not read"
Capture: TypeAlias = pytest.CaptureFixture[str]


class Disk:
    """A disk whose calls can stop answering, and whose counters stand still.

    Attributes:
        hung: Number of calls that have stopped.
        unguarded: Calls on paths of the test that nothing would have given up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, counters: Path) -> None:
        self._patch = monkeypatch
        self._folder = str(counters.parent)
        self.answers = threading.Event()
        self.hung = 0
        self.unguarded: list[str] = []
        self.calls: list[object] = []  # that have not ended
        self.counters = counters
        counters.write_text("1 2 3 4 5")
        monkeypatch.setattr(in_time, "counters_of", lambda path: self.counters)
        make = in_time._Call.make

        def noted(call: Any) -> None:
            self.calls.append(call)
            make(call)
            self.calls.remove(call)

        monkeypatch.setattr(in_time._Call, "make", noted)

    def hang(self, module: Any, name: str, *, when: Callable[..., bool] = lambda *_: True) -> None:
        """Let a function answer no more. The test fails if it is called where nothing would give it up."""
        original = getattr(module, name)

        def hanging(*args: Any, **kwargs: Any) -> Any:
            if not self.answers.is_set() and self._concerned(args, kwargs):
                if getattr(in_time._own, "call", None) is None:
                    self.unguarded.append(f"{name}{args}\n{''.join(traceback.format_stack(limit=6)[:-1])}")
                elif when(*args):
                    self.hung += 1
                    self.answers.wait()
            return original(*args, **kwargs)

        self._patch.setattr(module, name, hanging)

    def _concerned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call is about a path of the test, or about something that is no path."""
        of = next(iter(args), None)
        if isinstance(of, (str, bytes, os.PathLike)) and not os.path.isabs(of):
            of = kwargs.get("dir_fd")
        if isinstance(of, int):
            of = posix.readlink(f"/proc/self/fd/{of}")
        if not isinstance(of, (str, bytes, os.PathLike)):
            return True
        return os.fsdecode(of).startswith(self._folder) and of != self.counters

    def works_until_it_hangs(self) -> None:
        """Let the disk complete requests until a call hangs, however long that takes on a busy machine."""
        numbers = itertools.count()
        self._patch.setattr(in_time, "completed_requests", lambda _: 0 if self.hung else next(numbers))

    def answer(self) -> None:
        """Let everything answer again, and return when all calls have returned."""
        self.answers.set()
        await_that(lambda: not self.calls)
        assert not self.unguarded, "\n".join(self.unguarded)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Disk]:
    native.take_back_ask_to_end()  # which an earlier test's interrupt has left
    disk = Disk(monkeypatch, tmp_path / "stat")
    yield disk
    disk.answer()


def refused(path: Path, doing: str) -> Any:
    told = rf"{doing} '{path}' did not return while its disk did nothing for {SECONDS} s"
    return pytest.raises(StorageTimeoutError, match=told)


def test_files_that_are_not_created(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """The error names the file. If the disk answers later, the store is removed again, and its folder is free."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    folder = tmp_path / "storage"
    disk.hang(os, "posix_fallocate")
    with refused(folder / "default" / "rank-00000" / "state.bin", r"Allocating \d+ bytes for"):
        create([folder], io_timeout=SECONDS)
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        create([folder], io_timeout=SECONDS)
    disk.answer()
    assert not (folder / "default").exists()
    create([folder]).close(remove=True)


def test_free_space_that_is_not_told(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """The error names the storage folder."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    disk.hang(os, "statvfs")
    with refused(tmp_path, "Looking for free space in"), io_limit(SECONDS):
        measure_parameter_space([tmp_path], job="default", rank=0, sizes=[1])


def test_a_file_for_parameters_that_is_not_opened(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """The error names the lock; nothing is left once the disk answers."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    disk.hang(os, "fchmod")
    with pytest.raises(StorageTimeoutError, match=rf"parameters-00000.*nothing for {SECONDS} s"):
        TensorStore([tmp_path / "storage"], job="default", rank=0, direct_io="auto", io_timeout=SECONDS)
    disk.answer()
    assert not (tmp_path / "storage" / "default").exists()


def test_a_store_that_is_not_recovered(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """The error names the file that is read; the store is as it was, and can be recovered later."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    store = create([tmp_path])
    commit_generation(store, 0)
    store.close(remove=False)
    state = tmp_path / "default" / "rank-00000" / "state.bin"
    disk.hang(os, "pread", when=lambda descriptor, *_: os.readlink(f"/proc/self/fd/{descriptor}") == str(state))
    with refused(state, "Reading"):
        StateStore.recover([tmp_path], io_timeout=SECONDS)
    disk.answer()
    recovered = StateStore.recover([tmp_path])
    assert recovered.generation == 0
    recovered.close(remove=True)


def test_files_that_do_not_grow(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """A store that is to be spread anew over its folders ends in time, and its tasklets stay where they are."""
    attack("a disk stops answering in set-up or recovery", tries=1, outcome=ERROR)
    folders = [tmp_path / "a", tmp_path / "b"]
    store = create(folders, io_timeout=SECONDS)
    before = store.counts
    disk.hang(os, "posix_fallocate")
    with refused(folders[0] / "default" / "rank-00000" / "state.bin", r"Extending to \d+ bytes"):
        store.spread([sum(before), 0])
    assert store.counts == before
    disk.answer()
    store.close(remove=True)


def save_checkpoint(target: Path) -> None:
    """Save as the engine does."""
    with replacing(target, "tag") as (staging, _):
        (staging / "tag").mkdir()
        (staging / "tag" / "weights").write_bytes(b"1")


def export(target: Path) -> None:
    with staged(target) as new:
        new.mkdir()
        (new / "weights").write_bytes(b"1")


def convert(target: Path) -> None:
    convert_checkpoint(target.parent / "two.ckpt", target)


@pytest.mark.parametrize("write", [save_checkpoint, export, convert])
def test_a_folder_that_is_not_flushed(
    tmp_path: Path, disk: Disk, attack: Attack, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path], None]
) -> None:
    """The error names what is flushed; nothing has the final name, then or later, and the next attempt succeeds."""
    attack("a disk stops answering while a folder is saved", tries=1, outcome=f"{ERROR}; nothing has the final name")
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 0)
    for module in (folder_swap, file_systems):
        monkeypatch.setattr(module, "raising_together", lambda group=None: nullcontext())
        monkeypatch.setattr(module, "gather", lambda value, group: [value])
    shapes, whole = [OrderedDict(a=torch.Size([4]))], {"a": torch.arange(4.0)}
    save_of_two(tmp_path / "two.ckpt", shapes, whole, {"momentum_buffer": 100.0})
    target = tmp_path / "target"
    disk.hang(os, "fsync")
    told = rf"Flushing '{tmp_path}.*' did not return .* {SECONDS} s"
    with pytest.raises(StorageTimeoutError, match=told), io_limit(SECONDS):
        write(target)
    assert disk.hung and not target.exists()
    disk.answer()
    assert not target.exists()
    write(target)
    assert any(path.is_file() for path in target.rglob("*"))


FILE_CALLS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "write", "pwrite", "pread", "fsync", "fdatasync", "posix_fadvise", "mkdir")),
    *((os, name) for name in ("stat", "lstat", "listdir", "scandir", "rename", "replace", "unlink", "rmdir", "link")),
    *((builtins, "open"), (io, "open"), (os, "chmod"), (replacement, "exchange")),
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Trainer that has made one step and can save."""
    trainer = quiet_trainer(tmp_path_factory.mktemp("trained"), max_steps=1)
    trainer.fit(LitTiny(Recipe(precision="bf16-mixed", frozen=True)))
    yield trainer
    trainer.strategy.close()  # type: ignore[attr-defined]


def names_of_whole(checkpoint: Path) -> list[str]:
    """Return the names of a checkpoint's files, of which none is damaged."""
    restore_interrupted(checkpoint, "checkpoint")
    for file in (checkpoint / "checkpoint").glob("*.pt"):
        tensor_file.check_records(file, tensors=True)
    files = (str(file.relative_to(checkpoint)) for file in checkpoint.rglob("*") if file.is_file())
    return sorted(file for file in files if not file.startswith(".saving"))


def test_a_conversion_waits_for_no_disk_without_a_limit(tmp_path: Path, disk: Disk) -> None:
    """Each call of a conversion on a file, of the old checkpoint or the new one, would be given up."""
    shapes, whole = [OrderedDict(a=torch.Size([4]))], {"a": torch.arange(4.0)}
    save_of_two(tmp_path / "two.ckpt", shapes, whole, {"momentum_buffer": 100.0})
    for module, name in FILE_CALLS:
        disk.hang(module, name, when=lambda *_: False)
    convert(tmp_path / "target")
    disk.answer()


@pytest.mark.parametrize("long", long_but([False], [False, True]), ids=["last calls", "first and last calls"])
def test_a_save_of_a_training_on_a_disk_that_does_not_answer(
    trained: Any, tmp_path: Path, disk: Disk, attack: Attack, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    """Whichever call hangs, the first or the last of its kind, the save ends in time with path and seconds.

    Only if it is done, and what it has replaced is not removed, it raises nothing. A whole checkpoint is there each
    time, and the next save succeeds.
    """
    monkeypatch.setattr(engine, "io_limit", lambda _: io_limit(1.0))
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    (path / "checkpoint" / "notes.txt").write_text("mine")
    counts: Counter[str] = Counter()
    with monkeypatch.context() as patch:
        watching = Disk(patch, tmp_path / "stat")

        def counted(key: str, *_: Any) -> bool:
            counts[key] += 1
            return False

        for module, name in FILE_CALLS:
            watching.hang(module, name, when=partial(counted, f"{module.__name__}.{name}"))
        trained.save_checkpoint(path)
        called = Counter(counts)
        trained.save_checkpoint(tmp_path / "first.ckpt")
        watching.answer()
    before, met = names_of_whole(path), []
    assert all(counts[f"{module.__name__}.{name}"] for module, name in FILE_CALLS), " ".join(sorted(counts))
    for module, name in FILE_CALLS:
        last = called[f"{module.__name__}.{name}"]
        for number in sorted({1, last} if long else {last}) if last else ():
            with monkeypatch.context() as patch:
                hanging, calls = Disk(patch, tmp_path / "stat"), itertools.count(1)
                hanging.hang(module, name, when=lambda *_, calls=calls, number=number: next(calls) == number)
                try:
                    trained.save_checkpoint(path)
                    assert (path / ".saving").exists(), f"call {number} of {name} was waited for"
                    met.append("done")
                except StorageTimeoutError as error:
                    assert re.search(rf"'{tmp_path}.*for 1 s", str(error)), f"call {number} of {name}: {error}"
                    met.append("refused")
                assert hanging.hung, f"{name}, call {number}"
                hanging.answer()
            assert names_of_whole(path) == before, f"{name}, call {number}"
    assert met.count("done") < met.count("refused")
    what = "a disk stops answering while a training is saved"
    attack(what, tries=len(met), outcome=f"{ERROR}; a whole checkpoint is there")
    trained.save_checkpoint(path)
    assert not (path / ".saving").exists()
    assert (path / "checkpoint" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_load_of_a_checkpoint_waits_for_no_disk_without_a_limit(
    trained: Any, tmp_path: Path, disk: Disk, entry: str
) -> None:
    """Each call on a file of the checkpoint that a Trainer loads would be given up, except one of DeepSpeed's.

    It asks whether a file exists that was opened just before.
    """
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    elsewhere = trained.default_root_dir
    trainer = quiet_trainer(Path(elsewhere, entry), max_steps=2)
    for module, name in FILE_CALLS:
        disk.hang(module, name, when=lambda *_: False)
    module, options = LitTiny(Recipe(precision="bf16-mixed", frozen=True)), {"ckpt_path": path}
    if entry == "fit":
        trainer.fit(module, **options)
    else:
        trainer.validate(module, module.recipe.validation_loader(), **options)
    disk.unguarded = [call for call in disk.unguarded if "assert os.path.exists(load_path)" not in call]
    disk.answer()
    trainer.strategy.close()  # type: ignore[attr-defined]


def test_a_parameter_in_a_mapped_file_that_is_not_read(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """The read of a mapped parameter or buffer, which a page fault would make, is given up, too."""
    attack("a disk stops answering while a checkpoint is loaded", tries=1, outcome=ERROR)
    mapped = Mock(spec=torch.Tensor, clone=disk.answers.wait)
    file = tmp_path / "model_states.pt"
    for read in (lambda: ReadWhenUsed({"weight": mapped}, file)["weight"], lambda: read_mapped({"mean": mapped}, file)):
        with refused(file, "Reading"), io_limit(SECONDS):
            read()
        disk.answer()
        disk.answers.clear()


def test_a_description_that_is_not_written(tmp_path: Path, disk: Disk) -> None:
    """Torch writes to a disk that does not answer without holding Python up."""
    path, state = tmp_path / "pipe", {"names": [f"name {number}" for number in range(50_000)]}
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with refused(path, "Writing"), io_limit(SECONDS):
        tensor_file.saved_with_room(state, path)
    os.set_blocking(reader, True)
    while os.read(reader, 1 << 20):
        pass
    os.close(reader)
    disk.answer()


def test_a_checkpoint_that_is_not_read(tmp_path: Path, disk: Disk, attack: Attack) -> None:
    """A scrub gives it up, and tells what it found before."""
    attack("a disk stops answering while a checkpoint or state is scrubbed", tries=1, outcome=SAID)
    path = save_of_two(tmp_path / "two.ckpt", [OrderedDict(a=torch.Size([3]))], {"a": torch.arange(3.0)}, {})
    first, *_, last = sorted(path.rglob("*.pt"))
    first.write_bytes(b"damaged")
    disk.works_until_it_hangs()
    disk.hang(tensor_file, "_read_through", when=lambda archive, _: archive.filename == str(last))
    with io_limit(SECONDS):
        found = scrub_checkpoint(path, show=hidden)
    assert disk.hung == 1
    (damaged,), (unknown,) = found.damaged, found.unknown
    assert damaged.startswith(f"{first} is damaged")
    assert re.search(rf"Reading '{last}' did not return while its disk did nothing for {SECONDS} s", unknown)
    disk.answer()


@pytest.mark.parametrize(("module", "name"), [(jobs, "find_jobs"), (scrub, "_newest")])
def test_state_that_is_not_looked_at(
    module: Any, name: str, tmp_path: Path, disk: Disk, attack: Attack, capsys: Capture
) -> None:
    """A scrub gives up folders, manifests and records that it cannot read, and says that it cannot tell."""
    attack("a disk stops answering while a checkpoint or state is scrubbed", tries=1, outcome=SAID)
    store = create([tmp_path], world_size=1)
    commit_generation(store, 0)
    store.close(remove=False)
    disk.works_until_it_hangs()
    disk.hang(module, name)
    with io_limit(SECONDS):
        assert main(["scrub", str(tmp_path), "--quiet"]) == 2
    assert disk.hung == 1
    assert f"did nothing for {SECONDS} s" in capsys.readouterr().err
    disk.answer()


@pytest.mark.parametrize(("call", "options"), [("scandir", []), ("unlink", ["--remove", "default"])])
def test_jobs_that_are_not_looked_at(
    call: str, options: list[str], tmp_path: Path, disk: Disk, attack: Attack, capsys: Capture
) -> None:
    """The list of jobs, and the removal of one, end and say which folder does not answer."""
    attack("a disk stops answering while jobs are listed or removed", tries=1, outcome=ERROR)
    store = create([tmp_path], world_size=1)
    commit_generation(store, 0)
    store.close(remove=False)
    disk.works_until_it_hangs()
    disk.hang(os, call)
    with io_limit(SECONDS):
        assert main(["jobs", str(tmp_path), "--quiet", *options]) != 0
    assert disk.hung == 1
    assert f"did nothing for {SECONDS} s" in capsys.readouterr().err
    disk.answer()


def test_jobs_beside_a_disk_that_does_not_answer(
    tmp_path: Path, disk: Disk, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The jobs of the other folders are listed, and the exit status says that some are unknown."""
    folders = [tmp_path / name for name in ("dead", "works")]
    for folder in folders:
        folder.mkdir()
        store = create([folder], world_size=1)
        commit_generation(store, 0)
        store.close(remove=False)
    (tmp_path / "mounts").write_text(f"/dev/a {folders[0]} ext4 rw 0 0\n")
    monkeypatch.setattr(in_time, "_MOUNTS", tmp_path / "mounts")
    disk.hang(os, "scandir", when=lambda path, *_: path == folders[0])
    with io_limit(SECONDS):
        assert main(["jobs", *map(str, folders), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert f"'{folders[0]}' did not return" in err
    assert str(folders[1] / "default") in out
    disk.answer()


@pytest.mark.parametrize(
    ("call", "doing"),
    [("posix_fallocate", r"Allocating \d+ bytes for"), ("pwrite", "Writing"), ("fdatasync", "Flushing")],
)
def test_a_file_of_an_export_that_is_not_written(tmp_path: Path, disk: Disk, call: str, doing: str) -> None:
    """The error names the file."""
    disk.hang(os, call)
    path = tmp_path / "model.safetensors"
    with refused(path, doing), io_limit(SECONDS):
        file = SafetensorsFile(path, {"a": TensorSpec(torch.Size([2]), torch.float32, trained=True)})
        file.write("a", 0, torch.ones(2))
        file.close()


def test_room_for_an_export_that_is_not_told(tmp_path: Path, disk: Disk) -> None:
    """The error names the folder."""
    disk.hang(os, "statvfs")
    with refused(tmp_path, "Looking for free space in"), io_limit(SECONDS):
        require_room(tmp_path / "export", 1)


def test_a_disk_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """A call that lasts many times the limit returns if its disk completes requests all the time."""
    counts = itertools.count()

    def count(_: Path) -> int:
        if (number := next(counts)) == 20:
            disk.answers.set()
        return number

    monkeypatch.setattr(in_time, "completed_requests", count)
    assert unless_idle(disk.answers.wait, doing="Flushing", path=tmp_path, seconds=0.1)


def test_a_disk_that_works_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """Ctrl-C ends the call within seconds all the same."""
    counts = itertools.count()
    monkeypatch.setattr(in_time, "completed_requests", lambda _: next(counts))
    with interrupted():
        unless_idle(disk.answers.wait, doing="Flushing", path=tmp_path / "a" / "b", seconds=10 * LIMIT)


def test_a_disk_that_works_for_others_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """A call that does not return is given up after forty limits, whatever the disk does meanwhile."""
    counts = itertools.count()
    monkeypatch.setattr(in_time, "completed_requests", lambda _: next(counts))
    began = time.monotonic()
    with pytest.raises(StorageTimeoutError):
        unless_idle(disk.answers.wait, doing="Flushing", path=tmp_path / "a", seconds=0.1)
    assert time.monotonic() - began > 40 * 0.1


@pytest.mark.parametrize("counted", [True, False])
def test_a_process_that_is_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, request: pytest.FixtureRequest, counted: bool
) -> None:
    """After SIGTERM the limit is not renewed, whatever the disk does for others, nor longer where nobody can tell."""
    numbers = itertools.count()
    if not counted:
        monkeypatch.setattr(in_time, "counters_of", lambda _: None)
    monkeypatch.setattr(in_time, "completed_requests", lambda _: next(numbers))
    request.addfinalizer(native.take_back_ask_to_end)
    waited: list[float] = []
    monkeypatch.setattr(native, "note_given_up", waited.append)
    native.ask_to_end()
    with pytest.raises(StorageTimeoutError):
        unless_idle(disk.answers.wait, doing="Flushing", path=tmp_path / "a", seconds=0.5)
    assert 0.5 <= waited[0] <= 0.6


def test_another_disk_beside_one_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk
) -> None:
    """A disk that is mounted in the same folder as a dead one is asked all the same."""
    mounts = tmp_path / "mounts"
    monkeypatch.setattr(in_time, "_MOUNTS", mounts)
    first, second = tmp_path / "first disk", tmp_path / "second"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\n/dev/b {first} ext4 rw 0 0\n".replace("first disk", "first\\040disk"))
    with pytest.raises(StorageTimeoutError):
        unless_idle(disk.answers.wait, doing="Looking at", path=first, seconds=SECONDS)
    assert unless_idle(lambda: 7, doing="Looking at", path=second) == 7
    with pytest.raises(StorageTimeoutError, match="has not answered an earlier call"):
        unless_idle(lambda: 7, doing="Looking at", path=first)


def test_a_save_after_a_disk_that_does_not_answer(tmp_path: Path, disk: Disk) -> None:
    """A call that was given up on another disk keeps no lock of a later save."""
    with pytest.raises(StorageTimeoutError):
        unless_idle(disk.answers.wait, doing="Reading", path=tmp_path / "other" / "a", seconds=SECONDS)
    with locked(tmp_path / "staging", tmp_path / "target") as lock:
        lock.leaves_content = True
    with locked(tmp_path / "staging", tmp_path / "target"):
        pass
    assert not (tmp_path / "staging").exists()


def test_what_comes_too_late_is_undone(tmp_path: Path, disk: Disk) -> None:
    """A result is undone if it comes after the call was given up or interrupted; otherwise the caller has it."""
    undone: list[object] = []
    with pytest.raises(StorageTimeoutError):
        unless_idle(disk.answers.wait, doing="Opening", path=tmp_path / "a", seconds=SECONDS, undo=undone.append)
    assert not undone
    disk.answer()
    assert undone == [True]
    with interrupted():
        unless_idle(lambda: time.sleep(0.5), doing="Opening", path=tmp_path / "a", undo=undone.append)
    assert undone == [True, None]
    assert unless_idle(lambda: 7, doing="Opening", path=tmp_path / "a", undo=undone.append) == 7
    assert undone == [True, None]


def test_a_call_of_many_steps(tmp_path: Path, disk: Disk) -> None:
    """Each step has the whole limit; the error is about the last one."""
    disk.hang(os, "sync")
    begun: list[int] = []

    def work() -> None:
        for number in range(8):
            begun.append(number)
            with doing_now(f"Step {number} of", tmp_path / "file"):
                threading.Event().wait(SECONDS / 2)
        with doing_now("Flushing", tmp_path / "file"):
            os.sync()

    with refused(tmp_path / "file", "Flushing"):
        unless_idle(work, doing="Working on", path=tmp_path / "file", seconds=SECONDS)
    assert len(begun) == 8


def test_a_disk_that_nobody_can_look_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    """Where the system counts no requests, the limit is ten times as long."""
    disk.hang(os, "fsync")
    monkeypatch.setattr(in_time, "counters_of", lambda path: None)
    (tmp_path / "file").touch()
    with pytest.raises(StorageTimeoutError, match=r"Flushing '.*/file' did not return within 1 s"), io_limit(0.1):
        flush_tree(tmp_path / "file")
