"""Checkpoints in DeepSpeed's own format and universal ones, by its converter or our command: an error names misfits.

``test_resharding.py`` has the other optimizers and other numbers of processes, ``test_stock_checkpoint.py`` those that
were made of stock's checkpoints.
"""

from __future__ import annotations

import dataclasses
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.zero3.checkpoints.formats.universal_folder import UniversalFolder
from tests.helpers.attacks import Attack
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert, convert_by_command
from tests.training.worker import Run, launch, train

TINY = Recipe(groups=True, frozen=True, max_steps=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an ordinary checkpoint of one process."""
    folder = tmp_path_factory.mktemp("tiny")
    train(Run(out=str(folder), recipe=TINY, save_after_fit=str(folder / "tiny.ckpt")))
    return folder / "tiny.ckpt"


@pytest.fixture(scope="module")
def tiny(saved: Path) -> Path:
    """Return a universal checkpoint of one process, which DeepSpeed's converter wrote."""
    return convert(saved)


@pytest.fixture(scope="module")
def made_by_us(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a universal checkpoint of one process, with checksums, which our command wrote."""
    return convert_by_command(saved, tmp_path_factory.mktemp("ours") / "universal")


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


MODEL_STATES = "zero_pp_rank_0_mp_rank_00_model_states.pt"
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a moment is missing": (lambda u: (u / "zero/model.norm.bias/exp_avg.pt").unlink(), r"norm\.bias/exp_avg\.pt"),
    "a moment is cut short": (lambda u: cut_short(u / "zero/model.norm.bias/exp_avg_sq.pt"), "is damaged"),
    "a master has too few elements": (lambda u: shorten(u / "zero/model.norm.bias/fp32.pt"), "does not hold 32 elem"),
    "it was not converted to the end": (lambda u: (u / "zero/optimizer_state.pt").unlink(), r"optimizer_state\.pt"),
    "it has no model states": (lambda u: (u / MODEL_STATES).unlink(), "model_states"),
    "a bit of a master": (lambda u: flip(u / "zero/model.norm.bias/fp32.pt"), r"norm\.bias/fp32\.pt is damaged"),
    "a bit of a moment": (lambda u: flip(u / "zero/model.norm.bias/exp_avg.pt"), r"bias/exp_avg\.pt is damaged"),
    "no loss scale": (lambda u: lose(u / "zero/optimizer_state.pt", "dynamic_loss_scale"), "no usable 'dynamic_loss"),
    "no number of steps": (lambda u: lose(u / MODEL_STATES, "global_steps"), "no usable 'global_steps'"),
    "a bit of the model's states": (lambda u: flip(u / MODEL_STATES), r"model_states\.pt is damaged"),
    "no checksum of a moment": (
        lambda u: lose(u / "zero/crc32c.pt", "model.norm.bias/exp_avg.pt"),
        r"norm\.bias/exp_avg\.pt is damaged: the checksum of a block",
    ),
    "no checksums": (lambda u: (u / "zero/crc32c.pt").unlink(), r"has no file .*crc32c\.pt"),
}
USUAL = (
    "a moment is missing",
    "a bit of a master",
    "a bit of the model's states",
    "it was not converted to the end",
    "no loss scale",
    "no checksum of a moment",
    "no checksums",
)


def assert_refused(folder: Path, root: Path, named: str, module: LitTiny | None = None) -> None:
    """Assert that a fit does not resume from a folder, which it names, and that it has loaded nothing."""
    trainer: Any = quiet_trainer(root, precision="32-true", max_steps=4)
    module = module or LitTiny(TINY)
    with pytest.raises(CheckpointError, match=named) as caught:
        trainer.fit(module, ckpt_path=folder)
    assert caught.value.remedy
    optimizer = trainer.strategy.model.optimizer
    assert optimizer.update.drained_handler().generation == 0
    expected = dict(module.recipe.build_model().named_parameters())
    for name, param in module.model.named_parameters():
        assert torch.equal(param.ds_tensor, expected[name].detach().flatten()), name
        assert not param.requires_grad or torch.equal(optimizer.get_full_hp_param(param), expected[name].detach()), name


@pytest.mark.parametrize("name", long_but(USUAL, DAMAGES))
def test_damaged_universal_checkpoints_are_refused_and_nothing_is_loaded(
    name: str, tiny: Path, made_by_us: Path, tmp_path: Path, attack: Attack
) -> None:
    """The error names the file, and masters and parameters keep the model's own values."""
    attack("damage in a universal checkpoint", tries=1, outcome="CheckpointError, and nothing is loaded")
    damage, named = DAMAGES[name]
    folder = shutil.copytree(made_by_us if "checksum" in name else tiny, tmp_path / "copy")
    damage(folder)
    assert_refused(folder, tmp_path, named)


@pytest.mark.parametrize("array", long_but(["exp_avg"], ["fp32", "exp_avg"]))
def test_a_value_that_is_read_wrongly_when_it_is_loaded(
    array: str, made_by_us: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attack: Attack
) -> None:
    """What a load reads is compared with checksums, though the whole file was verified before."""
    attack("bit flip in a universal checkpoint between check and load", tries=1, outcome="CheckpointError")
    folder = shutil.copytree(made_by_us, tmp_path / "universal")
    flip_after_check(UniversalFolder, folder / f"zero/model.norm.bias/{array}.pt", monkeypatch)
    with pytest.raises(CheckpointError, match=rf"norm\.bias/{array}\.pt is damaged: the checksum of a block"):
        quiet_trainer(tmp_path, precision="32-true", max_steps=4).fit(LitTiny(TINY), ckpt_path=folder)


def flip_after_check(kind: Any, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a file once a reader of this class has verified its folder."""
    check = kind.check_arrays

    def check_and_flip(self: Any, names: Any) -> Any:
        found = check(self, names)
        flip(file)
        return found

    monkeypatch.setattr(kind, "check_arrays", check_and_flip)


def test_validation_of_a_universal_checkpoint_verifies_the_weights(tiny: Path, saved: Path, tmp_path: Path) -> None:
    """It gives the metric of the ordinary checkpoint, with tied and frozen weights, and reads the masters only."""

    def validated(path: Path) -> Any:
        module = LitTiny(dataclasses.replace(TINY, validate=True))
        return quiet_trainer(tmp_path, precision="32-true").validate(module, ckpt_path=path, verbose=False)

    folder = shutil.copytree(tiny, tmp_path / "copy")
    flip(folder / "zero/model.norm.bias/exp_avg.pt")
    assert validated(folder) == validated(saved)
    flip(folder / "zero/model.norm.bias/fp32.pt")
    with pytest.raises(CheckpointError, match=r"norm\.bias/fp32\.pt is damaged"):
        validated(folder)


def test_a_scrub_of_what_a_training_saved(saved: Path, tiny: Path, made_by_us: Path) -> None:
    """A checkpoint is whole, and so are the universal folders that DeepSpeed's converter and ours make of it."""
    for path in (saved, tiny, made_by_us):
        assert main(["scrub", str(path), "--quiet"]) == 0


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": "Adam"}, "saved with AdamW, the model is configured with Adam"),
    "other parameter groups": ({"groups": False}, "has 2 parameter groups, the optimizer 1"),
    "a parameter more": ({"depth": 3}, "blocks.2.down.bias' is missing there"),
    "a parameter less": ({"depth": 1}, "blocks.1.down.bias' is of shape .* there and missing here"),
    "another shape": ({"width": 16}, "is of shape .* there and of shape .* here"),
    "a frozen parameter": ({"frozen": False}, "positions.weight' is missing there"),
    "another precision": ({"precision": "bf16-true"}, "torch.float32"),
}


@pytest.mark.parametrize(
    "name", long_but(["another optimizer", "a parameter more", "another shape", "a frozen parameter"], MISFITS)
)
def test_universal_checkpoints_that_do_not_fit_are_refused(name: str, tiny: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = MISFITS[name]
    assert_misfit(tiny, tmp_path, changes, named)


def assert_misfit(checkpoint: Path, root: Path, changes: dict[str, Any], named: str) -> None:
    """Assert that a training whose recipe has these changes does not resume from a checkpoint, and says why."""
    with pytest.raises(CheckpointError, match=named) as caught:
        train(Run(out=str(root), recipe=dataclasses.replace(TINY, max_steps=4, **changes), resume=str(checkpoint)))
    assert caught.value.remedy


def test_a_buffer_that_a_universal_checkpoint_lacks(tiny: Path, tmp_path: Path) -> None:
    """The error names the missing buffer."""
    module = LitTiny(TINY)
    module.register_buffer("more", torch.zeros(1))
    assert_refused(tiny, tmp_path, "'more' is missing there", module)


# That of one process is in test_evaluation_load.py.
@pytest.mark.parametrize("devices", long_but([2], [1, 2]))
def test_zero_to_fp32_reads_our_checkpoints(devices: int, tmp_path: Path) -> None:
    """DeepSpeed's converter returns the masters of a saved folder bit for bit, including tied and frozen parameters."""
    recipe = Recipe(precision="bf16-mixed", groups=True, frozen=True, max_steps=3)
    path = tmp_path / "last.ckpt"
    (outcome,) = launch(Run(out=str(tmp_path / "run"), recipe=recipe, devices=devices, save_after_fit=str(path)))
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    converted = get_fp32_state_dict_from_zero_checkpoint(str(path))
    for name, master in outcome.masters.items():
        assert torch.equal(converted["model." + name], master), name
    assert torch.equal(converted["model.head.weight"], outcome.masters["tokens.weight"])
    assert converted["model.positions.weight"].shape == (16, 32)


ORDINARY_MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"optimizer": "Adam"}, "Adam"),
    "other parameter groups": ({"groups": False}, "parameter"),
    "another precision": ({"precision": "bf16-mixed"}, "bf16"),
}


@pytest.mark.parametrize("name", ORDINARY_MISFITS)
def test_checkpoints_that_do_not_fit_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """The error names the first difference."""
    changes, named = ORDINARY_MISFITS[name]
    assert_misfit(saved, tmp_path, changes, named)


def changing(change: Callable[[bytes], bytes], name: str = "optim_states") -> Callable[[Path], None]:
    """Return what changes the bytes of a file of a checkpoint."""

    def damage(checkpoint: Path) -> None:
        (file,) = checkpoint.rglob(f"*{name}.pt")
        file.write_bytes(change(file.read_bytes()))

    return damage


def flipped(content: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :]


@pytest.mark.parametrize("name", ["optim_states", "model_states"])
def test_a_flipped_bit_in_a_checkpoint_is_reported(name: str, saved: Path, tmp_path: Path, attack: Attack) -> None:
    """A single flipped bit in the middle of a file raises an error that names the file."""
    attack("bit flip in a file of a checkpoint", tries=1, outcome="CheckpointError with the file's name")
    changing(flipped, name)(shutil.copytree(saved, tmp_path / "a.ckpt"))
    assert_misfit(tmp_path / "a.ckpt", tmp_path, {}, rf"{name}\.pt")


def lose_file(checkpoint: Path) -> None:
    (file,) = checkpoint.rglob("*optim_states.pt")
    file.unlink()


ORDINARY_DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": changing(lambda content: content[: len(content) // 2]),
    "overwritten": changing(lambda content: content[:64] + bytes(448) + content[512:]),
    "a file is missing": lose_file,
    "no tag": lambda checkpoint: (checkpoint / "latest").unlink(),
    "not there": shutil.rmtree,
    "a plain file": lambda checkpoint: (shutil.rmtree(checkpoint), checkpoint.write_bytes(b"not a folder")),
}


@pytest.mark.parametrize(
    "name", long_but(["overwritten", "a file is missing", "not there", "a plain file"], ORDINARY_DAMAGES)
)
def test_damaged_checkpoints_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    """What is not whole, or not a checkpoint, raises an error with its name and a remedy."""
    ORDINARY_DAMAGES[name](shutil.copytree(saved, tmp_path / "a.ckpt"))
    assert_misfit(tmp_path / "a.ckpt", tmp_path, {}, r"a\.ckpt")
