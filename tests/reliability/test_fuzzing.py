"""Readers of damaged files raise this package's errors, whatever the files hold."""

from __future__ import annotations

import copy
import json
import shutil
import struct
import time
import zipfile
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from lightning_smartinfinity import native
from lightning_smartinfinity.errors import SmartInfinityError
from lightning_smartinfinity.storage import recover_store
from lightning_smartinfinity.zero3.checkpoints.formats.checkpoint_weights import CheckpointWeights
from lightning_smartinfinity.zero3.checkpoints.formats.universal_conversion import convert_checkpoint
from tests.fabric.worker import quiet_fabric
from tests.helpers.attacks import Attack
from tests.helpers.compressed import compress
from tests.helpers.models import Recipe
from tests.helpers.native_testing import decode_gradient
from tests.reliability.faults import Interrupted, same
from tests.storage.makers import commit_generation, create, manifest_with

OUTCOME = "read, or refused by an error of ours"
RECIPE = Recipe(frozen=True, width=8, depth=1)


@pytest.fixture(params=["short", pytest.param("long", marks=pytest.mark.long)])
def seconds(request: pytest.FixtureRequest) -> float:
    """Return how long to fuzz."""
    return 1.0 if request.param == "short" else float(request.config.getoption("fuzz_seconds"))


# ---- damage at random

_EXTREMES = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 1 << 31, 1 << 63, 1 << 64, 10**400, 0.5, -1e308, float("nan"), float("inf")),
    *("", "..", "../x", "a\0b", "\ud800", "x" * 10_000, b"x", [], {}, [0] * 1000, [[[[[[[[[[]]]]]]]]]]),
)


def fuzz(attempt: Callable[[Random], object], *, seconds: float, seed: str) -> int:
    """Call a function again and again, and return how often.

    Args:
        attempt: Reads something damaged. It draws all that is random from its argument.
        seconds: How long to go on; at least once.
        seed: Every call has a generator of its own, made of this, of ``seconds`` and of the call's number.

    Raises:
        AssertionError: A call raised an error that is not this package's.
    """
    end, tries = time.monotonic() + seconds, 0
    while tries == 0 or time.monotonic() < end:
        try:
            attempt(Random(f"{seed} {seconds} {tries}"))
        except SmartInfinityError as error:
            assert error.problem and error.remedy
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise AssertionError(f"try {tries} of seed {seed!r} for {seconds} s: {what}") from error
        tries += 1
    return tries


def damaged(content: bytes, random: Random) -> bytes:
    """Return bytes in which something was overwritten, lost, repeated or moved, as disks and strangers do."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 1, 2, 4, 16))):
        _DAMAGES[random.randrange(len(_DAMAGES))](changed, random)
    return bytes(changed)


def changed_value(tree: Any, random: Random, *, odd: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dictionaries and lists in which values were replaced, lost or repeated.

    Args:
        tree: The dictionary or list.
        random: Chooses what happens where.
        odd: Values to put in, beside those of this module.
    """
    tree = copy.deepcopy(tree)
    for _ in range(random.choice((1, 1, 2, 5))):
        _change_one(tree, random, (*_ODD, *odd))
    return tree


def _change_one(tree: Any, random: Random, odd: tuple[Any, ...]) -> None:
    node = tree
    while isinstance(node, (MutableMapping, MutableSequence)) and len(node):
        key = random.choice(list(node) if isinstance(node, MutableMapping) else range(len(node)))
        below = node[key]
        if isinstance(below, (MutableMapping, MutableSequence)) and len(below) and random.random() < 0.8:
            node = below
            continue
        what = random.random()
        if what < 0.15:
            del node[key]
        elif what < 0.25 and isinstance(node, MutableSequence):
            node.append(copy.deepcopy(below))
        elif what < 0.35 and isinstance(below, int):
            node[key] = below + random.choice((-1, 1))
        else:
            node[key] = copy.deepcopy(random.choice(odd))
        return


def _flip(content: bytearray, random: Random) -> None:
    if content:
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)


def _set_byte(content: bytearray, random: Random) -> None:
    if content:
        content[random.randrange(len(content))] = random.randrange(256)


def _set_number(content: bytearray, random: Random) -> None:
    size = random.choice((2, 4, 8))
    at = random.randrange(len(content) + 1) & -random.choice((1, size))
    content[at : at + size] = (random.choice(_EXTREMES) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def _cut(content: bytearray, random: Random) -> None:
    del content[random.randrange(len(content) + 1) :]


def _lose(content: bytearray, random: Random) -> None:
    del content[_range(content, random)]


def _repeat(content: bytearray, random: Random) -> None:
    part = content[_range(content, random)]
    at = random.randrange(len(content) + 1)
    content[at:at] = part


def _move(content: bytearray, random: Random) -> None:
    part = content[_range(content, random)]
    at = random.randrange(len(content) + 1)
    content[at : at + len(part)] = part


def _range(content: bytearray, random: Random) -> slice:
    begin = random.randrange(len(content) + 1)
    return slice(begin, begin + random.choice((1, 4, 16, 512, 4096)))


_DAMAGES = (_flip, _set_byte, _set_number, _cut, _lose, _repeat, _move)


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


KINDS = ("training", "residual")


@pytest.mark.filterwarnings("ignore")
def test_training_records(seconds: float, interrupted: Interrupted, attack: Attack) -> None:
    """A training resumes from records of which any, or any residual, were changed; each kind in half of the time."""

    def attempt(kind: str, random: Random) -> None:
        interrupted.restore()
        files = {name: sorted(interrupted.folder.glob(f"{name}-*.bin")) for name in KINDS}
        others = random.sample(files["training"] + files["residual"], random.choice((0, 0, 1, 3)))
        for file in (random.choice(files[kind]), *others):
            file.write_bytes(damaged(file.read_bytes(), random))
        assert same(interrupted.resumed(), interrupted.expected)

    tries = sum(fuzz(partial(attempt, kind), seconds=seconds / 2, seed=kind) for kind in KINDS)
    outcome = "resumed to the bit, or refused by an error of ours"
    attack("fuzzing of training records and residuals", tries=tries, seconds=seconds, outcome=outcome)


# ---- compressed gradients


def test_payloads(seconds: float, attack: Attack) -> None:
    """A payload is refused, or decoded into the elements of its tasklet and no others."""
    numel, guard = 70_000, 4096
    gradient = np.random.default_rng(0).standard_normal(numel).astype(np.float32)
    dtypes = (native.DType.FLOAT32, native.DType.BFLOAT16)
    valid = [compress(gradient, 0.01, dtype).tobytes() for dtype in dtypes]
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
    _, model, optimizer = RECIPE.set_up(fabric)
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


def read_weights(folder: Path) -> None:
    """Read all that an export reads."""
    weights = CheckpointWeights(folder)
    _ = weights.saved_models, weights.lacks_frozen, weights.client_state(), weights.state_dict_order()
    weights.read(list(weights.contents.parameters), lambda name, begin, values: None, masters=True)


CHECKPOINTS = {
    ("ordinary", "export"): "a checkpoint's files",
    ("universal", "export"): "a universal folder's files",
    ("ordinary", "resume"): "an ordinary checkpoint that a training resumes from",
    ("universal", "resume"): "a universal checkpoint that a training resumes from",
}
"""Kinds and readers of checkpoints, each with its name in the table."""


@pytest.mark.parametrize(("kind", "reader"), CHECKPOINTS)
def test_checkpoints(seconds: float, kind: str, reader: str, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """An export, a conversion or a training reads a checkpoint of which a file was changed, or is told why not."""
    folder = shutil.copytree(saved / kind, tmp_path / kind)
    files = {file: file.read_bytes() for file in sorted(folder.rglob("*.pt"))}

    with training(tmp_path) as (fabric, state):

        def attempt(random: Random) -> None:
            file = random.choice(list(files))
            changed_file(files[file], file, random)
            try:
                if reader == "resume":
                    fabric.load(folder, dict(state))
                else:
                    read_weights(folder)
                    convert_checkpoint(folder, tmp_path / "converted")
            finally:
                file.write_bytes(files[file])
                shutil.rmtree(tmp_path / "converted", ignore_errors=True)

        tries = fuzz(attempt, seconds=seconds, seed=f"{kind} {reader}")
    attack(f"fuzzing of {CHECKPOINTS[kind, reader]}", tries=tries, seconds=seconds, outcome=OUTCOME)
