"""Loading a checkpoint for evaluation gives the values of DeepSpeed's converter and verifies all that is read."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from lightning_smartinfinity import CheckpointError, SmartInfinityStrategy
from tests.helpers.damage import flip_bit_behind
from tests.helpers.fresh_python import fresh_environment
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import convert
from tests.helpers.waiting import PROCESS_LIMIT
from tests.training.evaluation_worker import RECIPE, Buffered, evaluated_values, train_and_save
from tests.training.worker import REPOSITORY


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that one process saved."""
    folder = tmp_path_factory.mktemp("one")
    train_and_save(quiet_trainer(folder, max_steps=2), folder / "one.ckpt")
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
    """Untied weights both take the saved tied values.

    Tied weights take the later name's values, as in load_state_dict.
    """
    untied = dataclasses.replace(RECIPE, tied=False)
    loaded = evaluated_values(quiet_trainer(tmp_path / "a"), saved, untied)
    assert_loaded(loaded, converted(saved))
    train_and_save(quiet_trainer(tmp_path / "b", max_steps=1), tmp_path / "untied.ckpt", untied)
    expected = converted(tmp_path / "untied.ckpt")
    again = evaluated_values(quiet_trainer(tmp_path / "c"), tmp_path / "untied.ckpt")
    assert not torch.equal(expected["model.tokens.weight"], expected["model.head.weight"])
    assert_loaded(again, {**expected, "model.tokens.weight": expected["model.head.weight"]})


@pytest.mark.long
def test_other_numbers_of_processes(saved: Path, tmp_path: Path) -> None:
    """Two processes load a checkpoint of one, and one process loads a checkpoint of two."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.evaluation_worker", str(tmp_path), str(saved)],
        cwd=REPOSITORY,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=PROCESS_LIMIT,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for rank in range(2):
        loaded = torch.load(tmp_path / f"loaded-{rank}.pt", weights_only=True)
        assert_loaded(loaded, converted(saved))
    assert_loaded(evaluated_values(quiet_trainer(tmp_path), tmp_path / "two.ckpt"), converted(tmp_path / "two.ckpt"))


def test_models_of_other_parameters(saved: Path, tmp_path: Path) -> None:
    """The error names the first difference. With strict_loading=False the parameters that both have are loaded."""
    deeper = dataclasses.replace(RECIPE, depth=3)
    with pytest.raises(CheckpointError, match=r"'model\.blocks\.2\..*' is missing there") as caught:
        evaluated_values(quiet_trainer(tmp_path / "a"), saved, deeper)
    assert caught.value.remedy.endswith(".")
    expected = converted(saved)
    loaded = evaluated_values(quiet_trainer(tmp_path / "b"), saved, deeper, strict=False)
    assert_loaded({name: values for name, values in loaded.items() if name in expected}, expected)
    wider = dataclasses.replace(RECIPE, width=64)
    with pytest.raises(CheckpointError, match=r"of shape .* there and of shape .* here"):
        evaluated_values(quiet_trainer(tmp_path / "c"), saved, wider, strict=False)


class Grown(Buffered):
    """A later version of the model that renames a module and also accepts the old name in load_state_dict."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self.branch = self.model.side
        self.model.side = torch.nn.Identity()  # type: ignore[assignment]
        self._register_load_state_dict_pre_hook(self.rename)

    def rename(self, state: dict[str, torch.Tensor], prefix: str, *_: object) -> None:
        """Rename the keys of a module that an older version saved."""
        for name in ("weight", "bias"):
            if (old := f"{prefix}model.side.{name}") in state:
                state[f"{prefix}branch.{name}"] = self.value(state.pop(old))

    def value(self, saved: torch.Tensor) -> torch.Tensor:
        return saved


class Halved(Grown):
    """A module whose load hook also changes values."""

    def value(self, saved: torch.Tensor) -> torch.Tensor:
        return saved / 2


@pytest.mark.seam("hooks may rename keys of saved weights", "Torch calls _load_state_dict_pre_hooks of a Module first.")
@pytest.mark.parametrize(
    ("kind", "strict"),
    long_but([("saved", True), ("universal", False)], itertools.product(["saved", "universal"], [True, False])),
)
def test_hooks_that_rename_keys(
    kind: str, strict: bool, saved: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Renamed parameters take the values saved under their old names."""
    expected = converted(saved)
    for name in ("weight", "bias"):
        expected[f"branch.{name}"] = expected.pop(f"model.side.{name}")
    loaded = evaluated_values(quiet_trainer(tmp_path), request.getfixturevalue(kind), strict=strict, module_class=Grown)
    assert_loaded(loaded, expected)


class Published(Buffered):
    """A module whose hooks rename keys both when it saves and when it loads a state dict."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__(recipe)
        self._register_state_dict_hook(lambda _, state, prefix, *__: self.rename(state, "model.side", "adapter"))
        self._register_load_state_dict_pre_hook(lambda state, *_: self.rename(state, "adapter", "model.side"))

    def rename(self, state: dict[str, torch.Tensor], old: str, new: str) -> None:
        for name in ("weight", "bias"):
            state[f"{new}.{name}"] = state.pop(f"{old}.{name}")


def test_hooks_that_rename_keys_both_ways(tmp_path: Path) -> None:
    """Parameters take the saved values although the state dict uses other names."""
    train_and_save(quiet_trainer(tmp_path, max_steps=1), tmp_path / "one.ckpt", module_class=Published)
    expected = converted(tmp_path / "one.ckpt")
    for name in ("weight", "bias"):
        expected[f"adapter.{name}"] = expected.pop(f"model.side.{name}")
    loaded = evaluated_values(quiet_trainer(tmp_path), tmp_path / "one.ckpt", module_class=Published)
    assert_loaded(loaded, expected)


def test_hooks_that_compute_values_are_refused(saved: Path, tmp_path: Path) -> None:
    """An error names the parameter whose value a hook would compute, even with strict_loading=False."""
    with pytest.raises(CheckpointError, match=r"Halved computes 'branch\.bias'") as caught:
        evaluated_values(quiet_trainer(tmp_path), saved, strict=False, module_class=Halved)
    assert "load_full_weights" in caught.value.remedy


def test_a_buffer_that_the_checkpoint_lacks(saved: Path, tmp_path: Path) -> None:
    """The error names the missing buffer."""

    class More(Buffered):
        def __init__(self, recipe: Recipe) -> None:
            super().__init__(recipe)
            self.register_buffer("more", torch.zeros(1))

    with pytest.raises(CheckpointError, match="more"):
        quiet_trainer(tmp_path).validate(More(RECIPE), ckpt_path=saved, verbose=False)


def damaged_copy(checkpoint: Path, file: str, saved: Path, root: Path, name: str = "model.tokens.weight") -> Path:
    folder = shutil.copytree(checkpoint, root / "damaged")
    master = converted(saved)[name].numpy().tobytes()
    flip_bit_behind(master[: len(master) // 2], folder / file)
    return folder


def test_a_training_outlives_a_damaged_checkpoint(saved: Path, tmp_path: Path) -> None:
    """A module keeps the weights of its fit when loading a damaged checkpoint fails."""
    file = "checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    folder = damaged_copy(saved, file, saved, tmp_path, name="model.side.weight")
    trainer, module = quiet_trainer(tmp_path, max_steps=1), Buffered(RECIPE)
    trainer.fit(module)
    trainer.validate(module, verbose=False)
    before = module.loaded
    with pytest.raises(CheckpointError, match="damaged"):
        trainer.validate(module, ckpt_path=folder, verbose=False)
    trainer.validate(module, verbose=False)
    trained = [name for name, param in module.named_parameters() if param.requires_grad]
    assert_loaded(*({name: values[name] for name in trained} for values in (module.loaded, before)))


@pytest.mark.parametrize(
    ("kind", "damaged"),
    [
        ("saved", "checkpoint/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("universal", "zero/model.tokens.weight/fp32.pt"),
    ],
)
def test_a_flipped_bit_in_the_masters_is_reported(
    kind: str, damaged: str, saved: Path, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """The error names the damaged file."""
    folder = damaged_copy(request.getfixturevalue(kind), damaged, saved, tmp_path)
    with pytest.raises(CheckpointError, match=Path(damaged).name.replace(".", r"\.")) as caught:
        quiet_trainer(tmp_path).validate(Buffered(RECIPE), ckpt_path=folder, verbose=False)
    assert caught.value.remedy.endswith(".")


def test_frozen_parameters_that_were_left_out(tmp_path: Path) -> None:
    """The error says how to load such a checkpoint. Then frozen parameters keep their initial values."""
    path = tmp_path / "trained.ckpt"
    strategy = SmartInfinityStrategy(tmp_path / "state", exclude_frozen_parameters=True)
    trainer, module = quiet_trainer(tmp_path, strategy, max_steps=2), Buffered(RECIPE)
    trainer.fit(module)
    trainer.save_checkpoint(path)
    strategy.close()
    for use in ("validate", "fit"):
        again = quiet_trainer(tmp_path / use, max_steps=3)
        with pytest.raises(CheckpointError, match=r"exclude_frozen_parameters.*strict_loading=False"):
            getattr(again, use)(Buffered(RECIPE), ckpt_path=path)
        lenient = Buffered(RECIPE)
        lenient.strict_loading = False
        getattr(quiet_trainer(tmp_path / f"{use}-again", max_steps=3), use)(lenient, ckpt_path=path)
