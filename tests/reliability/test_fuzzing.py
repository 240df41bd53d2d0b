"""Readers of damaged files raise this package's errors, whatever the files hold."""

from __future__ import annotations

import json
import shutil
import struct
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.storage import find_resumable, recover_store
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_folder import reading_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_weights import CheckpointWeights
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from tests.fabric.worker import quiet_fabric
from tests.helpers import payload
from tests.helpers.attacks import Attack
from tests.helpers.fuzz import changed_value, damaged, fuzz
from tests.helpers.models import Recipe
from tests.helpers.native_testing import decode_gradient
from tests.reliability.interrupted import Interrupted, same
from tests.storage.makers import commit_generation, create, manifest_with

OUTCOME = "read, or refused by an error of ours"
RECIPE = Recipe(frozen=True, width=8, depth=1)


@pytest.fixture(params=["short", pytest.param("long", marks=pytest.mark.long)])
def seconds(request: pytest.FixtureRequest) -> float:
    """Return how long to fuzz."""
    return 1.0 if request.param == "short" else float(request.config.getoption("fuzz_seconds"))


# ---- a store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return the folder of a rank's store with two generations, beside a copy of it."""
    opened = create([tmp_path / "storage"])
    for generation in range(2):
        commit_generation(opened, generation)
    opened.close(remove=False)
    return tmp_path / "storage" / "default" / "rank-00000"


def changed_manifest(content: bytes, random: Random) -> bytes:
    if random.random() < 0.3:
        return damaged(content, random)
    changed = changed_value(json.loads(content), random, odd=("fp32", "int8"))
    if isinstance(changed, dict) and changed and random.random() < 0.8:  # as somebody would who knows the checksum
        return manifest_with(changed)
    return json.dumps(changed, default=repr).encode()


def changed_record(content: bytes, random: Random) -> bytes:
    changed = bytearray(damaged(content, random))
    if len(changed) == len(content) and random.random() < 0.7:  # as somebody would who knows the checksum
        for begin in (0, len(content) // 2):
            (length,) = struct.unpack_from("<Q", content, begin + 48)
            values = np.frombuffer(bytes(changed[begin : begin + length - 4]), np.uint8)
            struct.pack_into("<I", changed, begin + length - 4, native.crc32c(values.ctypes.data, values.nbytes))
    return bytes(changed)


def changed_trailer(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) // 4096) * 4096 + 4096 - 128
    return content[:at] + damaged(content[at : at + 128], random)[:128].ljust(128, b"\0") + content[at + 128 :]


def changed_lock(content: bytes, random: Random) -> bytes:
    return bytes(random.randrange(100)) if random.random() < 0.2 else damaged(content, random)[:60_000]


FILES: dict[str, tuple[Callable[[bytes, Random], bytes], str]] = {
    "manifest.json": (changed_manifest, "a store's manifest"),
    "commit.bin": (changed_record, "a store's commit record"),
    "state.bin": (changed_trailer, "trailers of extents"),
    "lock": (changed_lock, "a store's lock"),
}
"""Files of a store, each with the change that is made to it, and its name in the table."""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.filterwarnings("ignore")  # of older generations
def test_files_of_a_store(name: str, seconds: float, store: Path, attack: Attack) -> None:
    """A store with one changed file is recovered or refused; many changes have right checksums.

    A lock file that an earlier process left stops no one.
    """
    change, what = FILES[name]
    originals = {file.name: file.read_bytes() for file in store.iterdir()}

    def attempt(random: Random) -> None:
        for archived in store.glob("*.aside"):
            archived.unlink()
        for file, content in originals.items():
            (store / file).write_bytes(content)
        (store / name).write_bytes(change(originals[name], random))
        try:
            recover_store([store.parent.parent]).close(remove=False)
        except SmartInfinityError as error:
            assert name != "lock", error
            raise

    tries = fuzz(attempt, seconds=seconds, seed=name)
    outcome = "the store is recovered" if name == "lock" else OUTCOME
    attack(f"fuzzing of {what}", tries=tries, seconds=seconds, outcome=outcome)


# ---- training records


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Interrupted:
    """Return an interrupted training with compressed gradients."""
    return Interrupted(tmp_path_factory.mktemp("interrupted"))


@pytest.mark.filterwarnings("ignore")
def test_training_records(seconds: float, interrupted: Interrupted, attack: Attack) -> None:
    """A training resumes from records of which any, or any residual, were changed."""

    def attempt(random: Random) -> None:
        interrupted.restore()
        files = sorted(interrupted.folder.glob("training-*.bin")) + sorted(interrupted.folder.glob("residual-*.bin"))
        for file in random.sample(files, random.choice((1, 1, 2, 4))):
            file.write_bytes(damaged(file.read_bytes(), random))
        assert same(interrupted.resumed(), interrupted.expected)

    tries = fuzz(attempt, seconds=seconds, seed="training records")
    outcome = "resumed to the bit, or refused by an error of ours"
    attack("fuzzing of training records and residuals", tries=tries, seconds=seconds, outcome=outcome)


def changed_header(content: bytes, random: Random) -> bytes:
    """Change numbers of a training record, or of the end of a residual, under a right checksum."""
    at = content.index(b"LSIRES01") if b"LSIRES01" in content else 0
    length = len(content) - at if at == 0 else 8 + 8 + 32 + 16 + 4 + 4  # magic to checksum, of one part
    changed = bytearray(content[at : at + length])
    header = damaged(bytes(changed[:88]), random)[:88].ljust(88, b"\0")
    changed[: min(88, length - 4)] = header[: length - 4]
    values = np.frombuffer(bytes(changed[:-4]), np.uint8)
    struct.pack_into("<I", changed, length - 4, native.crc32c(values.ctypes.data, values.nbytes))
    return content[:at] + bytes(changed) + content[at + length :]


TOLD = {"training-0.bin": "a training record", "residual-0.bin": "a residual"}


@pytest.mark.parametrize("name", TOLD)
@pytest.mark.filterwarnings("ignore")  # of older generations
def test_headers_of_training_records(seconds: float, name: str, tmp_path: Path, attack: Attack) -> None:
    """A record or residual is read whose numbers are others, under right checksums."""
    residual = np.arange(100, dtype=np.float32)
    opened = create([tmp_path], world_size=1)
    for generation in range(3):
        commit_generation(opened, generation)
        opened.record_training(generation=generation, step=generation, content=b"{}", has_steps=True, residual=residual)
        opened.records.finish_residual()
    opened.close(remove=False)
    file = tmp_path / "default" / "rank-00000" / name
    originals = {path: path.read_bytes() for path in file.parent.iterdir()}

    def attempt(random: Random) -> None:
        for path, content in originals.items():
            path.write_bytes(content)
        file.write_bytes(changed_header(originals[file], random))
        for record in find_resumable([tmp_path], job="default", rank=0)[1]:
            store = recover_store([tmp_path], newest=record.generation, training=record.number, run=bytes(16))
            try:
                if record.residual_numel and record.residual_numel < 1 << 20:
                    store.records.read_residual(np.empty(record.residual_numel, np.float32))
            finally:
                store.close(remove=False)

    tries = fuzz(attempt, seconds=seconds, seed=name)
    attack(f"fuzzing of the numbers in {TOLD[name]}", tries=tries, seconds=seconds, outcome=OUTCOME)


# ---- compressed gradients


def test_payloads(seconds: float, attack: Attack) -> None:
    """A payload is refused, or decoded into the elements of its tasklet and no others."""
    numel, guard = 70_000, 4096
    gradient = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    dtypes = (native.DType.FLOAT32, native.DType.BFLOAT16)
    valid = [payload.compress(gradient, 0.01, dtype).tobytes() for dtype in dtypes]
    out = np.zeros(4 * numel + guard, np.uint8)

    def attempt(random: Random) -> None:
        content = random.choice(valid)
        header = damaged(content[:64], random)[:64].ljust(64, b"\0") if random.random() < 0.5 else content[:64]
        content = header + (content[64:] if header != content[:64] else damaged(content[64:], random))
        memory = np.frombuffer(content + bytes(-len(content) % 4), np.uint8).copy()
        try:
            decode_gradient(memory.ctypes.data, len(content), numel, out.ctypes.data)
        except ValueError as error:  # the core's only error, of which callers make one of the package
            raise SmartInfinityError(str(error), "None.") from error

    tries = fuzz(attempt, seconds=seconds, seed="payload")
    outcome = "decoded within its tasklet, or ValueError"
    attack("fuzzing of compressed gradients", tries=tries, seconds=seconds, outcome=outcome)
    assert not out[4 * numel :].any()


# ---- checkpoints


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an ordinary and a universal checkpoint of Fabric."""
    root = tmp_path_factory.mktemp("fuzzed")
    with training(root) as (fabric, state):
        fabric.save(root / "ordinary", state)
    convert_checkpoint(root / "ordinary", root / "universal")
    return root


@contextmanager
def training(root: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a Fabric and the state of its loop after one step."""
    fabric = quiet_fabric(root / "storage")
    module = RECIPE.build_model()
    model, optimizer = fabric.setup(module, RECIPE.build_optimizer(list(module.named_parameters())))
    fabric.backward(model(RECIPE.batch(0)))
    optimizer.step()
    yield fabric, {"model": model, "optimizer": optimizer, "step": 1}
    fabric.strategy.close()


TENSORS = (torch.empty(0), torch.zeros(3, dtype=torch.int64), torch.ones(2, 2), torch.Size([2, 3]), {1, 2})


def changed_file(content: bytes, file: Path, random: Random) -> None:
    """Change a file of ``torch.save``: its bytes, its pickle with a right checksum, or its values."""
    how = random.random()
    if how < 0.3:
        file.write_bytes(damaged(content, random))
        return
    file.write_bytes(content)
    if how < 0.6:
        value = torch.load(file, weights_only=True)
        changed = changed_value(value, random, odd=TENSORS) if isinstance(value, dict) else random.choice(TENSORS)
        torch.save(changed, file)
        return
    with zipfile.ZipFile(file) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    (name,) = (name for name in records if name.endswith("data.pkl"))
    records[name] = damaged(records[name], random)
    with zipfile.ZipFile(file, "w") as archive:
        for name, record in records.items():
            archive.writestr(name, record)


def fuzz_checkpoint(folder: Path, read: Callable[[], object], *, seconds: float) -> int:
    """Read a checkpoint of which a file was changed, again and again."""
    files = {file: file.read_bytes() for file in sorted(folder.rglob("*.pt"))}

    def attempt(random: Random) -> None:
        file = random.choice(list(files))
        changed_file(files[file], file, random)
        try:
            read()
        finally:
            file.write_bytes(files[file])

    return fuzz(attempt, seconds=seconds, seed=folder.name)


def read_weights(folder: Path) -> None:
    """Read all that an export reads."""
    weights = CheckpointWeights(folder)
    _ = weights.saved_models, weights.lacks_frozen, weights.client_state(), weights.state_dict_order()
    weights.read(list(weights.contents.parameters), lambda name, begin, values: None, masters=True)


def test_checkpoints(seconds: float, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """An export and a conversion read a checkpoint whose files were changed."""
    folder = shutil.copytree(saved / "ordinary", tmp_path / "ordinary")

    def read() -> None:
        read_weights(folder)
        try:
            convert_checkpoint(folder, tmp_path / "universal")
        finally:
            shutil.rmtree(tmp_path / "universal", ignore_errors=True)

    tries = fuzz_checkpoint(folder, read, seconds=seconds)
    attack("fuzzing of a checkpoint's files", tries=tries, seconds=seconds, outcome=OUTCOME)


def test_universal_folders(seconds: float, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """An export and a resume read a universal folder whose files were changed."""
    path = shutil.copytree(saved / "universal", tmp_path / "universal")

    def read() -> None:
        read_weights(path)
        with reading_checkpoint(path):
            folder = UniversalFolder(path, rank=0, world_size=1)
            folder.check_states()
            _ = folder.steps, folder.param_groups, folder.extra
            for name, shape in folder.shapes.items():
                for array in ("fp32", *folder.arrays):
                    folder.require_array(name, array, numel=shape.numel())
                    folder.read(name, array, 0, np.empty(shape.numel(), np.float32))

    tries = fuzz_checkpoint(path, read, seconds=seconds)
    attack("fuzzing of a universal folder's files", tries=tries, seconds=seconds, outcome=OUTCOME)


@pytest.mark.parametrize("kind", ["ordinary", "universal"])
def test_resumes(seconds: float, kind: str, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """A training resumes from a checkpoint whose files were changed, or is told why not."""
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    with training(tmp_path) as (fabric, state):
        tries = fuzz_checkpoint(folder, lambda: fabric.load(folder, dict(state)), seconds=seconds)
    what = f"fuzzing of {'a' if kind == 'universal' else 'an'} {kind} checkpoint that a training resumes from"
    attack(what, tries=tries, seconds=seconds, outcome=OUTCOME)
