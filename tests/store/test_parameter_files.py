"""Parameter files: their places never overlap, they have their own folder, and closing leaves nothing behind."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_smartinfinity.errors import StorageFullError, StorageLockedError
from lightning_smartinfinity.store import ParameterFiles, Place, measure_parameter_space, require_space
from tests.helpers.waiting import PROCESS_LIMIT
from tests.store.makers import create

BLOCK = 4096


def make(*folders: Path, **kwargs: object) -> ParameterFiles:
    return ParameterFiles(folders, **{"job": "default", "rank": 0, "direct_io": "off", **kwargs})  # type: ignore[arg-type]


def sizes_of(folder: Path) -> list[int]:
    return [path.stat().st_size for path in folder.rglob("parameters.bin")]


def test_places_are_whole_blocks_and_never_overlap(tmp_path: Path) -> None:
    """Places are whole blocks and never overlap in any order of allocation, and freed places are used again."""
    files = make(tmp_path / "a", tmp_path / "b")
    choose, taken = random.Random(1), []
    for _ in range(300):
        if taken and choose.random() < 0.4:
            files.free(taken.pop(choose.randrange(len(taken))))
        else:
            taken.append(files.allocate(choose.choice([1, BLOCK, 5 * BLOCK + 1])))
    blocks = [(p.file, block) for p in taken for block in range(p.offset, p.offset + p.nbytes, BLOCK)]
    assert len(blocks) == len(set(blocks))
    assert all(place.offset % BLOCK == place.nbytes % BLOCK == 0 for place in taken)
    assert files.taken_bytes == sum(place.nbytes for place in taken)
    size = sum(sizes_of(tmp_path))
    for place in taken:
        files.free(place)
    assert sum(files.allocate(place.nbytes).nbytes for place in taken) == files.taken_bytes
    assert sum(sizes_of(tmp_path)) == size


def test_parameters_are_dealt_to_the_emptiest_folder(tmp_path: Path) -> None:
    """A large parameter goes to one folder and the small ones to the other. Their blocks are allocated at once."""
    files = make(tmp_path / "a", tmp_path / "b")
    places = [files.allocate(nbytes) for nbytes in (9 * BLOCK, 1, 2 * BLOCK, BLOCK)]
    assert places == [Place(0, 0, 9 * BLOCK), *(Place(1, o * BLOCK, n * BLOCK) for o, n in ((0, 1), (1, 2), (3, 1)))]
    for path in tmp_path.rglob("parameters.bin"):
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 0


def test_closing_removes_everything(tmp_path: Path) -> None:
    """Closing removes the file, the lock and the folders, and leaves the optimizer state of the same job alone."""
    files, store = make(tmp_path), create([tmp_path])
    files.allocate(1)
    files.close()
    files.close()
    assert {path.name for path in (tmp_path / "default").iterdir()} == {"rank-00000"}
    store.close(remove=True)
    assert not list(tmp_path.iterdir())


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """A second process is refused, and the first keeps its file."""
    files = make(tmp_path)
    files.allocate(BLOCK)
    with pytest.raises(StorageLockedError, match="parameters-00000"):
        make(tmp_path)
    assert sizes_of(tmp_path) == [BLOCK]
    files.close()


def test_what_a_killed_process_left_is_replaced(tmp_path: Path) -> None:
    """The file left by a killed process counts as free space, and the next process starts with an empty file."""
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from lightning_smartinfinity.store import ParameterFiles\n"
        "files = ParameterFiles([Path(sys.argv[1])], job='default', rank=0, direct_io='off')\n"
        "files.allocate(1 << 20)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert (
        subprocess.run(
            [sys.executable, "-c", script, tmp_path], env=environment, check=False, timeout=PROCESS_LIMIT
        ).returncode
        == -9
    )
    assert sizes_of(tmp_path) == [1 << 20]
    (request,) = measure_parameter_space([tmp_path], job="default", rank=0, sizes=[5])
    assert request.reclaimable_bytes >= 1 << 20 and request.needed_bytes == BLOCK
    files = make(tmp_path)
    assert sizes_of(tmp_path) == [0]
    files.close()


def test_too_little_space_for_the_parameters(tmp_path: Path) -> None:
    """Parameters too large for the file system are refused beforehand, and the error says that they need the space."""
    with pytest.raises(StorageFullError, match=r"The parameters need .* GiB in .*, where .* are free"):
        require_space(measure_parameter_space([tmp_path], job="default", rank=0, sizes=[1 << 60]))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_while_a_parameter_is_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a place cannot be allocated, the error names path and offset, and the existing places stay."""
    files = make(tmp_path)
    files.allocate(BLOCK)

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StorageFullError, match=r"offset 4096 of .*parameters\.bin"):
        files.allocate(2 * BLOCK)
    assert files.taken_bytes == BLOCK
    monkeypatch.undo()
    assert files.allocate(2 * BLOCK).offset == BLOCK
    files.close()
