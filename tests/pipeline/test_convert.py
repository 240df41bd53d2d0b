"""Converting kept stores to other state formats."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity.common.progress import hidden
from lightning_smartinfinity.errors import ConfigError, StorageCorruptError, StorageError
from lightning_smartinfinity.pipeline.state.convert import convert_store
from lightning_smartinfinity.storage import recover_store
from tests.native.builds import in_fork
from tests.pipeline.harness import Case, Run, after_steps, assert_equal, running
from tests.storage.makers import flip, manifest_with, tree
from tests.storage.test_archiving import leave, steps_in

FORMATS = ["fp32", "bf16", "int8", "int8_remainder"]


def kept(folder: Path, case: Case) -> dict[str, torch.Tensor]:
    """Create a store, do three steps, close it without removal, and return its state."""
    run = Run(folder, case)
    run.steps(range(3))
    state = run.state()
    run.close(remove=False)
    return state


def opened(folder: Path, case: Case, partition: torch.Tensor) -> dict[str, torch.Tensor]:
    with running(folder, case, recover=True) as run:
        run.set_partition(partition.split([group.numel for group in run.layout.sub_groups]))
        return run.state()


@pytest.mark.parametrize(
    ("asked", "error", "told"),
    [
        ({"state_format": "int2"}, ConfigError, r"'int2'.*unknown"),
        ({"state_format": "int8_remainder"}, ConfigError, "needs parameters in bf16; these are in float32"),
        ({"rank": 1}, StorageError, "no optimizer state"),
        ({"job": "other"}, StorageError, r"Looking for optimizer state in .*/other"),
        ({"tasklet_bytes": 100}, ConfigError, "tasklet_bytes=100"),
        ({"into": "disk0"}, ConfigError, r"convert_store\(.*disk0' twice"),
        ({"into": "x/../disk0"}, ConfigError, r"convert_store\(.*disk0' twice"),
        ({"into": None}, ConfigError, r"into=\[\]"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, asked: dict[str, Any], error: type[Exception], told: str) -> None:
    """Unknown formats, remainders without bf16, missing stores and wrong folders are refused, and nothing is made."""
    kept(tmp_path, Case())
    settings = {"state_format": "bf16", "into": "new", **asked}
    into = settings.pop("into")
    with pytest.raises(error, match=told):
        convert_store([tmp_path / "disk0"], [tmp_path / into] if into else [], **settings)
    assert not (tmp_path / "new").exists()
    recover_store([tmp_path / "disk0"]).close(remove=True)


@pytest.mark.parametrize(
    ("is_damaged", "told"), [(False, r"interrupted after step 7\. It is not replaced"), (True, "its files are damaged")]
)
def test_a_training_where_the_new_state_would_be(tmp_path: Path, is_damaged: bool, told: str) -> None:
    """It may be resumed, so no part of it is replaced, with or without records; the error says how to remove it."""
    kept(tmp_path, Case())
    folders = [tmp_path / "disk1", tmp_path / "new"]
    leave(folders, step=7)
    if is_damaged:
        for path in folders[0].rglob("training*"):
            path.write_bytes(path.read_bytes()[:40])
    before = tree(tmp_path / "new")
    for into in folders:
        with pytest.raises(StorageError, match=told) as caught:
            convert_store([tmp_path / "disk0"], [into], state_format="bf16")
        assert f"smart-infinity jobs {folders[0]} {folders[1]} --remove default" in caught.value.remedy
    assert tree(tmp_path / "new") == before
    assert steps_in(folders, "default") == {(0, 0): 0 if is_damaged else 7, (0, 1): 0}


def flip_bits(folder: Path) -> None:
    path = next(folder.rglob("state.bin"))
    for offset in (100, path.stat().st_size // 2 + 100):
        flip(path, offset)


def describe_otherwise(folder: Path, **change: object) -> None:
    path = next(folder.rglob("manifest.json"))
    manifest = json.loads(path.read_text())
    manifest["parameters"][1] |= change
    path.write_bytes(manifest_with(manifest))


@pytest.mark.parametrize(
    "damage",
    [
        flip_bits,
        *(
            partial(describe_otherwise, **change)
            for change in ({"numel": 1 << 70}, {"numel": 1, "real_numel": 0}, {"sub_group": 5}, {"real_numel": -1})
        ),
        partial(describe_otherwise, group="x"),
    ],
)
def test_damaged_sources(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A flipped bit, and a manifest that does not describe the stored parameters, are found; nothing new is left."""
    kept(tmp_path, Case())
    damage(tmp_path)
    told = "does not match its checksum" if damage is flip_bits else "does not describe the parameters"
    with pytest.raises(StorageCorruptError, match=told):
        convert_store([tmp_path / "disk0"], [tmp_path / "new"], state_format="int8")
    assert not (tmp_path / "new").exists() or list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("state_format", "other"),
    [
        *(("fp32", other) for other in FORMATS),
        *((name, "fp32") for name in FORMATS[1:]),
        ("bf16", "int8"),
        ("int8", "int8_remainder"),
        ("int8_remainder", "bf16"),
    ],
)
def test_there_and_back(tmp_path: Path, state_format: str, other: str) -> None:
    """Any format converts to any other, and back. The source is unchanged.

    Masters and step counts are kept. Moments are rounded to the new format, and survive fp32 and back bit for bit.
    """
    case = Case(dtype=torch.bfloat16, state_format=state_format, num_devices=2)
    second = case.but(state_format=other, num_devices=1, tasklet_bytes=100_000)
    state = kept(tmp_path / "first", case)
    disks = {name: [tmp_path / name / f"disk{index}" for index in range(2)] for name in ("first", "back")}
    convert_store(disks["first"], [tmp_path / "second/disk0"], state_format=other, tasklet_bytes=100_000)
    convert_store([tmp_path / "second/disk0"], disks["back"], state_format=state_format, tasklet_bytes=64 * 1024)
    assert_equal(opened(tmp_path / "first", case, state["partition"]), state)
    # Half a unit of a format's mantissa. Its smallest codes have fewer bits.
    exact = other in ("fp32", state_format) or {state_format, other} == {"int8", "int8_remainder"}
    rtol, atol = (0, 0) if exact else (2**-8, 0) if other == "bf16" else (2**-4, 1e-9)
    for folder, its_case in (("second", second), ("back", case)):
        found = opened(tmp_path / folder, its_case, state["partition"])
        assert torch.equal(found["steps"], state["steps"])
        torch.testing.assert_close(found["master"], state["master"], rtol=0 if exact else 1e-6, atol=0)
        torch.testing.assert_close(found["exp_avg_sq"], state["exp_avg_sq"], rtol=rtol, atol=atol)
        assert not exact or torch.equal(found["exp_avg"], state["exp_avg"])


def test_every_rank_is_converted_and_kept(tmp_path: Path) -> None:
    """All ranks are converted in order, also one without elements, and the new store is kept, too.

    Ctrl-C at the second rank removes the new stores of both. What a kill leaves is replaced. The old ones stay intact.
    """
    cases = [Case(keep=True), Case(keep=True, rank=1), Case(keep=True, rank=2, shapes=((0, 0, 0, 0),))]
    states = [kept(tmp_path / "old", case) for case in cases]

    def interrupt(what: str, total: int) -> Any:
        if what.endswith("rank 1"):
            raise KeyboardInterrupt
        return hidden(what, total)

    old, new = [tmp_path / "old" / "disk0"], [tmp_path / "new" / "disk0"]
    with pytest.raises(KeyboardInterrupt):
        convert_store(old, new, state_format="int8", show=interrupt)
    assert list(new[0].iterdir()) == []
    killed = partial(convert_store, show=lambda *_: signal.raise_signal(signal.SIGKILL))
    assert in_fork(partial(killed, old, new, state_format="int8")) == -signal.SIGKILL
    with pytest.raises(StorageError, match="holds no commit record"):
        recover_store(new)
    assert convert_store(old, new, state_format="fp32", tasklet_bytes=64 * 1024) == (0, 1, 2)
    with pytest.raises(StorageError, match="asked to keep it"):
        convert_store(old, new, state_format="bf16")
    for folder in ("old", "new"):
        for case, state in zip(cases, states, strict=True):
            assert_equal(opened(tmp_path / folder, case, state["partition"]), state)


# ---- the handler with every state format, against torch, and refused formats. test_programs.py has the bits


TINY = ((1, 0, 0, 0),) * 100 + ((3, 1, 1, 1),) * 100 + ((300, 0, 0, 1), (255, 0, 1, 2), (1, 0, 0, 2))


@pytest.mark.parametrize(
    ("name", "dtype"),  # int8_remainder needs parameters in bf16
    [
        ("bf16", torch.float32),
        ("bf16", torch.bfloat16),
        ("int8", torch.float32),
        ("int8", torch.float16),
        ("int8_remainder", torch.bfloat16),
    ],
)
def test_neighbours_do_not_change_a_bit(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Tiny parameters are rounded the same in one segment or in many, because blocks end with parameters."""
    case = Case(dtype=dtype, state_format=name, shapes=TINY)
    alike = case.but(options=(case.options[0], case.options[0]))
    variants = alike.but(tasklet_bytes=1 << 20), alike, case
    states = [after_steps(tmp_path / str(number), variant) for number, variant in enumerate(variants)]
    assert_equal(states[0], states[1])
    # The parameters of the first group have the same hyperparameters in all.
    first = torch.cat([torch.full((numel,), group == 0) for numel, _, group, _ in TINY])
    keys = ("master", "exp_avg", "exp_avg_sq", "partition")
    assert [key for key in keys if not torch.equal(states[2][key][first], states[0][key][first])] == []


def test_formats_that_a_store_is_not_in(tmp_path: Path) -> None:
    """Another format than a store's is refused. One of a newer version is refused by name, and is no damage."""
    run = Run(tmp_path, Case(state_format="int8", num_devices=2))
    run.close(remove=False)
    with pytest.raises(ConfigError, match="is in the format 'int8', state_format='fp32' was asked for"):
        recover_store(run.folders, state_format="fp32")
    store = recover_store(run.folders, state_format="int8")
    assert (store.manifest.state_format, store.manifest.folders) == ("int8", tuple(map(str, run.folders)))
    store.close(remove=False)
    for path in tmp_path.rglob("manifest.json"):
        path.write_bytes(manifest_with(json.loads(path.read_text()) | {"state_format": "int2"}))
    with pytest.raises(StorageError, match="in the format 'int2'; this package reads fp32, bf16, int8") as refused:
        recover_store(run.folders)
    assert not isinstance(refused.value, StorageCorruptError) and "version" in refused.value.remedy
