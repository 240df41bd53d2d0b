"""Small stores for the store's tests, without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_smartinfinity import native
from lightning_smartinfinity.settings import TransferConfig
from lightning_smartinfinity.storage import ExtentMap, StateStore, StoreDescription, create_store, recover_store
from lightning_smartinfinity.storage.jobs.jobs import Job, find_jobs, with_lost_parts
from lightning_smartinfinity.storage.spread import Placement
from tests.native.builds import in_fork

NUMEL = 5_000


def extents(num_devices: int = 1, *, places_per_tasklet: int = 2, numel: int = NUMEL) -> ExtentMap:
    return ExtentMap(
        numel=numel, tasklet_numel=1024, num_arrays=3, num_devices=num_devices, places_per_tasklet=places_per_tasklet
    )


def description(num_parameters: int = 2) -> StoreDescription:
    return StoreDescription(
        optimizer="AdamW",
        arrays=("master", "exp_avg", "exp_avg_sq"),
        parameters=tuple({"name": f"p{index}", "numel": 10} for index in range(num_parameters)),
        groups=({"lr": 0.1},),
    )


def create(
    folders: Sequence[Path],
    *,
    rank: int = 0,
    world_size: int = 2,
    num_machines: int = 1,
    job_id: bytes | None = None,
    **config: Any,
) -> StateStore:
    settings = TransferConfig(**config)
    return create_store(
        folders,
        config=settings,
        extents=extents(len(folders), places_per_tasklet=settings.places_per_tasklet),
        description=description(),
        rank=rank,
        world_size=world_size,
        num_machines=num_machines,
        job_id=job_id,
    )


@contextmanager
def created(folders: Sequence[Path], **config: Any) -> Iterator[StateStore]:
    store = create(folders, **config)
    try:
        yield store
    finally:
        store.close(remove=True)


def left(*folders: Path, generations: int = 1, steps: Sequence[int] = (), content: bytes = b"", **config: Any) -> Path:
    """Leave a store of some generations, as a kill does, and return its folder in the first storage folder.

    The first generations have training records of these steps, with this content. If there are more steps than
    generations, the kill came within a step that was recorded.
    """
    store = create(folders, **config)
    for generation in range(max(generations, len(steps))):
        if generation < generations:
            commit_generation(store, generation)
        if generation < len(steps):
            store.record_training(generation=generation, step=steps[generation], content=content, has_steps=True)
    store.close(remove=False)
    return Path(store.files[0].path).parent


def flipped(content: bytes, at: int, bit: int = 2) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def flip(file: Path, at: int, bit: int = 2) -> bytes:
    """Flip a bit in a byte of a file, and return what the file held before."""
    before = file.read_bytes()
    file.write_bytes(flipped(before, at, bit))
    return before


def recovered(*folders: Path, remove: bool = True, **options: Any) -> int:
    """Recover a store, and return its generation. Then remove the store, or leave it again."""
    store = recover_store(folders, **options)
    store.close(remove=remove)
    return store.generation


def write_generation(store: StateStore, generation: int, *, tasklets: Sequence[int] | None = None) -> Placement:
    """Write extents of zeros to the next places, as this generation, and return where every tasklet lies then."""
    chosen = range(store.extents.num_tasklets) if tasklets is None else tasklets
    following = store.next_placement()
    write_extents(store, generation, following, chosen)
    return store.placement.after(following, np.asarray(chosen, np.intp))


def write_extents(store: StateStore, generation: int, following: Placement, chosen: Iterable[int]) -> None:
    """Write extents of zeros of some tasklets to their places, as this generation."""
    batch = native.Batch(
        native.Operation.WRITE,
        [
            native.Tasklet(
                index=index,
                read_file=0,
                numel=store.extents.extents[index].numel,
                num_arrays=store.extents.num_arrays,
                extent_bytes=store.extents.extents[index].nbytes,
                read_offset=0,
                read_generation=0,
                write_file=int(following.devices[index]),
                write_offset=store.extents.place_offset(int(following.positions[index])),
                write_generation=generation,
                segments=[],
            )
            for index in chosen
        ],
    )
    pipeline = native.Pipeline(
        files=list(store.files), identity=store.identity, num_buffers=2, buffer_bytes=4 * 4096, io_threads=1
    )
    pipeline.submit(batch)
    assert pipeline.finish() is None
    pipeline.close()


def persist_generations(store: StateStore, number: int, *, content: bytes = b"") -> None:
    """Commit some generations in memory, write a training record of the last one, and complete it on storage."""
    for generation in range(store.generation + 1, store.generation + 1 + number):
        store.commit(
            generation=generation,
            placement=store.placement,
            tasklet_generations=np.full(store.extents.num_tasklets, generation, np.int64),
            steps=np.full(len(store.steps), generation, np.int64),
        )
    store.record_training(generation=store.generation, step=store.generation, content=content, has_steps=True)

    store.persist(lambda placement, chosen: write_extents(store, generation, placement, map(int, chosen)))


def commit_generation(store: StateStore, generation: int) -> None:
    """Write and commit a whole generation whose step counts equal its number."""
    placement = write_generation(store, generation)
    store.commit(
        generation=generation,
        placement=placement,
        tasklet_generations=np.full(store.extents.num_tasklets, generation, np.int64),
        steps=np.full(len(store.steps), generation, np.int64),
    )


@contextmanager
def held_by_another_process(folder: Path) -> Iterator[int]:
    """Let another process hold a rank's folder, and yield its number."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from lightning_smartinfinity.storage.folders.rank_folder import RankFolder\n"
        "held = RankFolder(Path(sys.argv[1]), create=False)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    pipe, command = subprocess.PIPE, [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder.pid
        holder.communicate()


def residual_memory(seed: int, numel: int = NUMEL) -> NDArray[np.float32]:
    """Return aligned values, as a residual has them."""
    values = np.frombuffer(native.HostBuffer(4 * numel).memoryview(), np.float32)[:numel]
    values[:] = np.random.default_rng(seed).standard_normal(numel, np.float32)
    return values


def manifest_with(values: Mapping[str, Any]) -> bytes:
    """Return a manifest with these values under a right checksum, as somebody would write it who knows the format."""
    content = json.dumps({key: value for key, value in values.items() if key != "crc32"}, indent=1, default=repr)
    body = content.encode()[: -len("\n}")]
    return body + f',\n "crc32": "{zlib.crc32(body):08x}"\n}}'.encode()


def listed(*folders: Path) -> list[Job]:
    """Return the jobs in storage folders, with what the commands say of them."""
    return with_lost_parts(folders[0], [job for each in folders for job in find_jobs(each)], calls_of=lambda _: None)


def refuse_to_open(monkeypatch: Any, number: int, when: Callable[[int], bool]) -> None:
    """Make ``os.open`` fail by an error of this number for flags of some kind."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
        if when(flags):
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refusing)


def tree(folder: Path) -> set[str]:
    """Return the paths of everything below a folder."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def killed_before(number: int, action: Callable[[], object], *, names: Sequence[str] = ("rename", "unlink")) -> bool:
    """Do something in a process that ends before a later system call of some kinds; return whether there was one.

    Args:
        number: Number of these calls that take place.
        action: Function to call.
        names: Names of the calls in ``os``.
    """
    left = iter(range(number))

    def counted(call: Any) -> Any:
        return lambda *args, **kwargs: call(*args, **kwargs) if next(left, None) is not None else os._exit(9)

    def counting() -> None:
        for name in names:
            setattr(os, name, counted(getattr(os, name)))
        action()

    status = in_fork(counting)
    assert status in (0, 9)
    return status != 0
