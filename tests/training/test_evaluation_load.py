"""Loading a checkpoint for evaluation gives the values of DeepSpeed's converter and verifies all that is read."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lightning_smartinfinity import CheckpointError, SmartInfinityStrategy
from tests.helpers.damage import flip_bit_behind
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.universal import convert

RECIPE = Recipe(precision="bf16-mixed", groups=True, frozen=True, odd=True, validate=True)


class Buffered(LitTiny):
    """A module that counts its steps in a buffer and keeps the values that it loaded."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("seen", torch.zeros(1))
        self.loaded: dict[str, torch.Tensor] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_validation_start(self) -> None:
        with deepspeed.zero.GatheredParameters(list(self.parameters())):
            self.loaded = {name: tensor.detach().clone() for name, tensor in self.state_dict().items()}


def evaluated_values(
    trainer: pl.Trainer,
    path: Path,
    recipe: Recipe = RECIPE,
    *,
    strict: bool = True,
    module_class: type[Buffered] = Buffered,
) -> dict[str, torch.Tensor]:
    """Validate a zeroed module from a checkpoint and return all its values."""
    module: Any = module_class(recipe)
    for tensor in (*module.parameters(), *module.buffers()):
        torch.nn.init.zeros_(tensor)
    module.strict_loading = strict
    trainer.validate(module, ckpt_path=path, verbose=False)
    return module.loaded  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that one process saved."""
    folder = tmp_path_factory.mktemp("one")
    trainer = fit(Buffered(RECIPE), folder, max_steps=2)
    trainer.save_checkpoint(folder / "one.ckpt")
    trainer.strategy.close()  # type: ignore[attr-defined]
    return folder / "one.ckpt"


@pytest.fixture(scope="module")
def universal(saved: Path) -> Path:
    """Return the same checkpoint, converted to a universal one."""
    return convert(saved)


def converted(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights that DeepSpeed's own converter reads."""
    return get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))  # type: ignore[no-any-return]


def assert_loaded(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert loaded.keys() == expected.keys()
    for name, values in loaded.items():
        assert torch.equal(values, expected[name].to(values.dtype)), name


@pytest.mark.parametrize("kind", ["saved", "universal"])
def test_values_are_those_of_the_converter(
    kind: str, saved: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Trained, frozen, tied and small parameters and buffers take the saved values, whatever the model's own seed."""
    expected = converted(saved)
    loaded = evaluated_values(quiet_trainer(tmp_path), request.getfixturevalue(kind))
    assert_loaded(loaded, expected)
    assert float(loaded["seen"]) == 2


def test_weights_that_are_tied_there_and_not_here(saved: Path, tmp_path: Path) -> None:
    """Untied weights both take the saved tied values. Tied ones take the later name's, as in load_state_dict."""
    untied = dataclasses.replace(RECIPE, tied=False)
    assert_loaded(evaluated_values(quiet_trainer(tmp_path), saved, untied), converted(saved))
    trainer = fit(Buffered(untied), tmp_path / "untied", max_steps=1)
    trainer.save_checkpoint(tmp_path / "untied.ckpt")
    expected = converted(tmp_path / "untied.ckpt")
    assert not torch.equal(expected["model.tokens.weight"], expected["model.head.weight"])
    again = evaluated_values(quiet_trainer(tmp_path / "tied"), tmp_path / "untied.ckpt")
    assert_loaded(again, {**expected, "model.tokens.weight": expected["model.head.weight"]})


class More(Buffered):
    """A module with a buffer that was not saved."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.register_buffer("more", torch.zeros(1))


def test_models_of_other_parameters(saved: Path, tmp_path: Path) -> None:
    """The error names the first difference. With strict_loading=False the parameters that both have are loaded."""
    deeper = dataclasses.replace(RECIPE, depth=3)
    for recipe, module_class, strict, named in (
        (deeper, Buffered, True, r"'model\.blocks\.2\..*' is missing there"),
        (dataclasses.replace(RECIPE, width=64), Buffered, False, r"of shape .* there and of shape .* here"),
        (RECIPE, More, True, "more"),
    ):
        with pytest.raises(CheckpointError, match=named) as caught:
            evaluated_values(quiet_trainer(tmp_path), saved, recipe, strict=strict, module_class=module_class)
        assert caught.value.remedy.endswith(".")
    expected = converted(saved)
    loaded = evaluated_values(quiet_trainer(tmp_path / "b"), saved, deeper, strict=False)
    assert_loaded({name: values for name, values in loaded.items() if name in expected}, expected)


def rename(state: dict[str, torch.Tensor], old: str, new: str) -> None:
    """Rename the keys of a module that another version saved."""
    for name in ("weight", "bias"):
        if f"{old}.{name}" in state:
            state[f"{new}.{name}"] = state.pop(f"{old}.{name}")


class Grown(Buffered):
    """A later version of the model that renames a module and also accepts the old name in load_state_dict."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.branch = self.model.side
        self.model.side = torch.nn.Identity()  # type: ignore[assignment]
        self._register_load_state_dict_pre_hook(lambda state, *_: rename(state, "model.side", "branch"))


@pytest.mark.seam("hooks may rename keys of saved weights", "Torch calls _load_state_dict_pre_hooks of a Module first.")
@pytest.mark.parametrize(("kind", "strict"), [("saved", True), ("universal", False)])
def test_hooks_that_rename_keys(
    kind: str, strict: bool, saved: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Renamed parameters take the values saved under their old names, although the state dict may use others."""
    expected = converted(saved)
    rename(expected, "model.side", "branch")
    path = request.getfixturevalue(kind)
    assert_loaded(evaluated_values(quiet_trainer(tmp_path), path, strict=strict, module_class=Grown), expected)


@pytest.mark.parametrize(
    ("kind", "damaged", "name"),
    [
        ("saved", "checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "model.side.weight"),
        ("universal", "zero/model.tokens.weight/fp32.pt", "model.tokens.weight"),
    ],
)
def test_a_training_outlives_a_damaged_checkpoint(
    kind: str, damaged: str, name: str, saved: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The error names the file with a flipped bit in a master, and a module keeps the weights of its fit."""
    folder = shutil.copytree(request.getfixturevalue(kind), tmp_path / "damaged")
    master = converted(saved)[name].numpy().tobytes()
    flip_bit_behind(master[: len(master) // 2], folder / damaged)
    trainer, module = quiet_trainer(tmp_path, max_steps=1), Buffered(RECIPE)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    before = module.loaded
    with pytest.raises(CheckpointError, match="damaged") as caught:
        trainer.validate(module, ckpt_path=folder, verbose=False)
    assert Path(damaged).name in str(caught.value) and caught.value.remedy.endswith(".")
    trainer.validate(module, verbose=False)
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    assert_loaded(*({name: values[name] for name in trained} for values in (module.loaded, before)))


def test_frozen_parameters_that_were_left_out(tmp_path: Path) -> None:
    """The error says how to load such a checkpoint. Then frozen parameters keep their initial values."""
    path = tmp_path / "trained.ckpt"
    strategy = SmartInfinityStrategy(tmp_path / "state", exclude_frozen_parameters=True)
    fit(Buffered(RECIPE), tmp_path, strategy, max_steps=2).save_checkpoint(path)
    strategy.close()
    for use in ("validate", "fit"):
        again = quiet_trainer(tmp_path / use, max_steps=3)
        with pytest.raises(CheckpointError, match=r"exclude_frozen_parameters.*strict_loading=False"):
            getattr(again, use)(Buffered(RECIPE), ckpt_path=path)
        lenient = Buffered(RECIPE)
        lenient.strict_loading = False
        getattr(quiet_trainer(tmp_path / f"{use}-again", max_steps=3), use)(lenient, ckpt_path=path)
