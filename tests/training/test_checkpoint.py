"""Checkpoints of one process and of two, in DeepSpeed's own format and universal ones: errors name misfits and damage.

``test_resume.py`` has other optimizers and numbers of processes, ``test_stock_checkpoint.py`` those that were made
of stock's checkpoints.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.errors import StorageTimeoutError
from lightning_smartinfinity.integrations.transformers.arguments import job_of
from lightning_smartinfinity.settings.transfer import JOB_NAME
from lightning_smartinfinity.storage.io.deadlines import io_limit
from lightning_smartinfinity.zero3.checkpoints.folders.staged_save import restore_interrupted
from lightning_smartinfinity.zero3.checkpoints.formats import tensor_file
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from lightning_smartinfinity.zero3.checkpoints.formats.zero_folder import ZeroFolder
from lightning_smartinfinity.zero3.engine import training as engine
from tests.helpers.assertions import assert_equal, differing
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.processes import run_module
from tests.helpers.silent_disk import ERROR, FILE_CALLS, SilentDisk
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert, convert_by_command
from tests.training.worker import Run, launch, train

TINY = Recipe(groups=True, frozen=True, max_steps=2)
Checkpoints = dict[str, Path]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Return those of one process and of two, and universal ones by DeepSpeed's converter and, with checksums, ours."""
    folder = tmp_path_factory.mktemp("checkpoints")
    one, two = folder / "one.ckpt", folder / "two.ckpt"
    train(Run(out=str(folder), recipe=TINY, save_after_fit=str(one)))
    launch(Run(out=str(folder / "two"), recipe=TINY, devices=2, save_after_fit=str(two)))
    return {"one": one, "two": two, "universal": convert(one), "ours": convert_by_command(one, folder / "ours")}


def file_of(checkpoint: Path, rank: int = 0, kind: str = "optim") -> Path:
    (file,) = checkpoint.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt")
    return file


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def shorten(file: Path) -> None:
    torch.save(torch.load(file)[:-1].clone(), file)


def lose(file: Path, key: str) -> None:
    content = torch.load(file)
    del content[key]
    torch.save(content, file)


def flip(file: Path) -> None:
    """Flip one bit in the middle of the file's largest tensor."""
    with zipfile.ZipFile(file) as archive:
        records = [info for info in archive.infolist() if "/data/" in info.filename]
    info = max(records, key=lambda info: info.file_size)
    content = bytearray(file.read_bytes())
    name_and_extra = sum(struct.unpack_from("<HH", content, info.header_offset + 26))
    content[info.header_offset + 30 + name_and_extra + info.file_size // 2] ^= 1
    file.write_bytes(content)


def exchange(first: Path, second: Path) -> None:
    content = first.read_bytes()
    second.replace(first)
    second.write_bytes(content)


def add_a_process(checkpoint: Path) -> None:
    file = file_of(checkpoint, 1)
    shutil.copy(file, file.with_name(file.name.replace("rank_1_mp", "rank_2_mp")))


Damage = tuple[str, Callable[[Path], object], str]
OF_ONE: dict[str, Damage] = {
    "a bit of an array": ("one", lambda c: flip(file_of(c)), r"optim_states\.pt"),
    "a bit of model states": ("one", lambda c: flip(file_of(c, kind="model")), r"model_states\.pt"),
    "a file is missing": ("one", lambda c: file_of(c).unlink(), r"copy"),
    "no tag": ("one", lambda c: (c / "latest").unlink(), r"copy"),
    "not there": ("one", shutil.rmtree, r"copy"),
    "a plain file": ("one", lambda c: (shutil.rmtree(c), c.write_bytes(b"not a folder")), r"copy"),
}
# test_zero_folder.py has files that do not belong together.
OF_TWO: dict[str, Damage] = {
    "a bit of an array of two": ("two", lambda c: flip(file_of(c, 1)), r"rank_1_.*optim_states\.pt is damaged: the c"),
    "cut short": ("two", lambda c: cut_short(file_of(c, 1)), "rank_1_.*damaged"),
    "optimizer states are missing": ("two", lambda c: file_of(c, 1).unlink(), "of 1 processes, and says that 2 saved"),
    "optimizer states too many": ("two", add_a_process, "optimizer states of 3 processes; 2 saved"),
    "model states are missing": ("two", lambda c: file_of(c, 1, "model").unlink(), "states of 1 processes; 2 saved"),
    "a bit of model states of two": (
        "two",
        lambda c: flip(file_of(c, 1, "model")),
        r"rank_1_.*model_states\.pt is damaged",
    ),
    "optimizer states exchanged": (
        "two",
        lambda c: exchange(file_of(c, 0), file_of(c, 1)),
        r"rank_0_.*optim_states\.pt was saved by rank 1",
    ),
    "model states exchanged": (
        "two",
        lambda c: exchange(file_of(c, 0, "model"), file_of(c, 1, "model")),
        r"rank_0_.*model_states\.pt was saved by rank 1",
    ),
    "not whole": ("two", lambda c: (c / "latest").unlink(), "no file 'latest'"),
}
BIAS = Path("zero/model.norm.bias")
UNIVERSAL: dict[str, Damage] = {
    "a moment is missing": ("universal", lambda c: (c / BIAS / "exp_avg.pt").unlink(), r"norm\.bias/exp_avg\.pt"),
    "a moment is cut short": ("universal", lambda c: cut_short(c / BIAS / "exp_avg_sq.pt"), "is damaged"),
    "too few elements": ("universal", lambda c: shorten(c / BIAS / "fp32.pt"), "does not hold 32 elem"),
    "not converted to the end": ("universal", lambda c: (c / "zero/optimizer_state.pt").unlink(), "optimizer_state"),
    "no model states": ("universal", lambda c: file_of(c, kind="model").unlink(), "model_states"),
    "a bit of a master": ("universal", lambda c: flip(c / BIAS / "fp32.pt"), r"norm\.bias/fp32\.pt is damaged"),
    "a bit of a moment": ("universal", lambda c: flip(c / BIAS / "exp_avg.pt"), r"bias/exp_avg\.pt is damaged"),
    "no loss scale": (
        "universal",
        lambda c: lose(c / "zero/optimizer_state.pt", "dynamic_loss_scale"),
        "no usable 'dynamic_loss",
    ),
    "no number of steps": (
        "universal",
        lambda c: lose(file_of(c, kind="model"), "global_steps"),
        "no usable 'global_steps'",
    ),
    "a bit of the model's states": (
        "universal",
        lambda c: flip(file_of(c, kind="model")),
        r"model_states\.pt is damaged",
    ),
    "no checksum of a moment": (
        "ours",
        lambda c: lose(c / "zero/crc32c.pt", "model.norm.bias/exp_avg.pt"),
        r"norm\.bias/exp_avg\.pt is damaged: the checksum of a block",
    ),
    "no checksums": ("ours", lambda c: (c / "zero/crc32c.pt").unlink(), r"has no file .*crc32c\.pt"),
}
DAMAGES = {**OF_ONE, **OF_TWO, **UNIVERSAL}
ATTACKED = {
    "one": "damage in a checkpoint",
    "two": "damage in a checkpoint of another number of processes",
    "universal": "damage in a universal checkpoint",
    "ours": "damage in a universal checkpoint",
}
USUAL = (
    *("a bit of an array", "a bit of model states", "not there"),
    *("a bit of an array of two", "optimizer states are missing", "optimizer states exchanged"),
    *("a bit of a master", "a bit of the model's states", "not converted to the end"),
    *("no loss scale", "no checksum of a moment"),
)


def assert_refused(folder: Path, root: Path, named: str, module: LitTiny | None = None) -> None:
    """Assert that a fit does not resume from a folder, and says why, and that it has loaded nothing."""
    module = module or LitTiny(TINY)
    trainer: Any = quiet_trainer(root, precision=module.recipe.precision, max_steps=4)
    with pytest.raises(CheckpointError, match=named) as caught:
        trainer.fit(module, ckpt_path=folder)
    assert caught.value.remedy
    optimizer = trainer.strategy.model.optimizer
    assert optimizer.update.drained_handler().generation == 0
    expected = dict(module.recipe.build_model().named_parameters())
    for name, param in module.model.named_parameters():
        values = expected[name].detach().to(param.ds_tensor.dtype)
        assert torch.equal(param.ds_tensor, values.flatten()), name
        assert not param.requires_grad or torch.equal(optimizer.get_full_hp_param(param).to(values.dtype), values), name


@pytest.mark.parametrize("name", long_but(USUAL, DAMAGES))
def test_a_damaged_checkpoint_is_refused_and_nothing_is_loaded(
    name: str, checkpoints: Checkpoints, tmp_path: Path, attack: Attack
) -> None:
    """The error names the file or says what is wrong, and masters and parameters keep the model's own values."""
    kind, damage, named = DAMAGES[name]
    attack(ATTACKED[kind], tries=1, outcome="CheckpointError, and nothing is loaded")
    folder = shutil.copytree(checkpoints[kind], tmp_path / "copy")
    damage(folder)
    assert_refused(folder, tmp_path, named)


@pytest.mark.parametrize(
    ("kind", "what", "reader", "file"),
    [
        ("two", "a checkpoint", ZeroFolder, "checkpoint/zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("ours", "a universal checkpoint", UniversalFolder, BIAS / "exp_avg.pt"),
        pytest.param(
            *("ours", "a universal checkpoint", UniversalFolder, BIAS / "fp32.pt"), marks=pytest.mark.long, id="master"
        ),
    ],
)
def test_a_value_that_is_read_wrongly_when_it_is_loaded(
    kind: str,
    what: str,
    reader: Any,
    file: Path,
    checkpoints: Checkpoints,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    attack: Attack,
) -> None:
    """What a load reads is compared with checksums, though the whole file was verified before."""
    attack(f"bit flip in {what} between check and load", tries=1, outcome="CheckpointError")
    folder, check = shutil.copytree(checkpoints[kind], tmp_path / "copy"), reader.check_arrays

    def check_and_flip(self: Any, names: Any) -> Any:
        found = check(self, names)
        flip(folder / file)
        return found

    monkeypatch.setattr(reader, "check_arrays", check_and_flip)
    with pytest.raises(CheckpointError, match=rf"{Path(file).name} is damaged: the checksum of a block"):
        quiet_trainer(tmp_path, precision="32-true", max_steps=4).fit(LitTiny(TINY), ckpt_path=folder)


def test_every_rank_raises_what_one_has_found(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """The rank that verifies a damaged array names it, and the others raise the same."""
    folder = shutil.copytree(checkpoints["two"], tmp_path / "copy")
    flip(file_of(folder, 1))
    run = Run(out=str(tmp_path), recipe=TINY, devices=3, resume=str(folder))
    (tmp_path / "runs.json").write_text(json.dumps([dataclasses.asdict(run)]))
    done = run_module("tests.training.worker", tmp_path / "runs.json", ranks=3)
    assert done.returncode != 0 and (done.stdout + done.stderr).count("is wrong. It comes from rank") >= 3


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": "Adam"}, "saved with AdamW, the model is configured with Adam"),
    "other parameter groups": ({"groups": False}, "has 2 parameter groups, the optimizer 1|parameter 1 is"),
    "a parameter more": ({"depth": 3}, "blocks.2.down.bias' is missing there"),
    "a parameter less": ({"depth": 1}, "blocks.1.down.bias' is of shape .* there and missing here"),
    "another shape": ({"width": 16}, "is of shape .* there and of shape .* here"),
    "a frozen parameter": ({"frozen": False}, "positions.weight' is missing there"),
    "another precision": ({"precision": "bf16-true"}, "torch.float32|was saved without bf16"),
    "a buffer more": ({}, "'more' is missing there"),
}
FIT_NOT = [
    *(("one", name) for name in ("another optimizer", "other parameter groups", "another precision")),
    *itertools.product(["two", "universal"], MISFITS),
]
USUAL_MISFITS = [
    *FIT_NOT[:2],
    ("two", "another precision"),
    *(("universal", name) for name in ("another shape", "a frozen parameter", "a buffer more")),
]


@pytest.mark.parametrize(("kind", "name"), long_but(USUAL_MISFITS, FIT_NOT))
def test_a_checkpoint_that_does_not_fit_is_refused(
    kind: str, name: str, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    module = LitTiny(dataclasses.replace(TINY, **changes))
    if name == "a buffer more":
        module.register_buffer("more", torch.zeros(1))
    assert_refused(checkpoints[kind], tmp_path, named, module)


def test_validation_of_a_universal_checkpoint_verifies_the_weights(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """It gives the metric of the ordinary checkpoint, with tied and frozen weights, and reads the masters only."""

    def validated(path: Path) -> Any:
        module = LitTiny(dataclasses.replace(TINY, validate=True))
        return quiet_trainer(tmp_path, precision="32-true").validate(module, ckpt_path=path, verbose=False)

    folder = shutil.copytree(checkpoints["universal"], tmp_path / "copy")
    flip(folder / BIAS / "exp_avg.pt")
    assert validated(folder) == validated(checkpoints["one"])
    flip(folder / BIAS / "fp32.pt")
    with pytest.raises(CheckpointError, match=r"norm\.bias/fp32\.pt is damaged"):
        validated(folder)


def test_a_scrub_of_what_a_training_saved(checkpoints: Checkpoints) -> None:
    """Checkpoints are whole, and so are the universal folders that DeepSpeed's converter and ours make of one."""
    for path in checkpoints.values():
        assert main(["scrub", str(path), "--quiet"]) == 0


# That of one process is in test_evaluation_load.py.
def test_zero_to_fp32_reads_our_checkpoints(checkpoints: Checkpoints) -> None:
    """DeepSpeed's converter returns the masters of a saved folder bit for bit, including tied and frozen parameters."""
    converted = get_fp32_state_dict_from_zero_checkpoint(str(checkpoints["two"]))
    masters = torch.load(checkpoints["two"].with_name("two") / "masters.pt", weights_only=True)
    assert_equal({name: converted["model." + name] for name in masters}, masters)
    assert torch.equal(converted["model.head.weight"], masters["tokens.weight"])
    assert converted["model.positions.weight"].shape == (16, 32)


# ---- trainings in folders whose names are no text: bytes that are not UTF-8, which Python shows as lone surrogates


def test_a_training_in_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """Parameters and state lie there, and checkpoints of both kinds are saved, scrubbed, loaded and exported."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    recipe, on_storage = Recipe(odd=True, max_steps=3), {"zero": {"offload_param": {"device": "nvme"}}}
    straight, _, expected = train(Run(out=str(folder / "a"), recipe=recipe, save_at=(1,), options=on_storage))
    saved = folder / "a/step-1.ckpt"
    universal = convert_by_command(saved, folder / "universal")
    for number, path in enumerate((saved, universal)):
        assert main(["scrub", str(path), "--quiet"]) == 0
        again = Run(out=str(folder / f"b{number}"), recipe=recipe, resume=str(path), options=on_storage)
        resumed, _, found = train(again)
        assert (
            resumed.losses == straight.losses[1:]
            and differing(found.masters, expected.masters) == []
            and main(["export", str(path), str(folder / f"{number}.ckpt"), "--to", "lightning"]) == 0
        )
        LitTiny.load_from_checkpoint(folder / f"{number}.ckpt", recipe=recipe)


def test_the_job_of_an_output_folder() -> None:
    """A job's name is text, and differs for folders that differ in such bytes alone."""
    first, second = (job_of(os.fsdecode(b"/runs/caf" + byte)) for byte in (b"\xe9", b"\xe8"))
    assert (
        JOB_NAME.holds(first) and JOB_NAME.holds(second) and first != second and job_of("/runs/one") == "one-0436b62a"
    )


# ---- a training saves to, and loads from, a disk that does not answer


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


@pytest.mark.parametrize("long", long_but([False], [False, True]), ids=["last calls", "first and last calls"])
def test_a_save_of_a_training_on_a_disk_that_does_not_answer(
    trained: Any, tmp_path: Path, disk: SilentDisk, attack: Attack, monkeypatch: pytest.MonkeyPatch, long: bool
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
        watching = SilentDisk(patch, tmp_path / "stat")

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
                hanging, calls = SilentDisk(patch, tmp_path / "stat"), itertools.count(1)
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
    assert not (path / ".saving").exists() and (path / "checkpoint" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("entry", ["fit", "validate"])
def test_a_load_of_a_checkpoint_waits_for_no_disk_without_a_limit(
    trained: Any, tmp_path: Path, disk: SilentDisk, entry: str
) -> None:
    """Each call on a file of the checkpoint that a Trainer loads would be given up, except one of DeepSpeed's.

    It asks whether a file exists that was opened just before.
    """
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    trainer = quiet_trainer(Path(trained.default_root_dir, entry), max_steps=2)
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
