"""A checkpoint's weights for evaluation, and whole weights of one file, reach partitioned models and their masters."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from lightning_smartinfinity import CheckpointError, ConfigError, SmartInfinityStrategy, UnsupportedError
from lightning_smartinfinity.cli import main
from lightning_smartinfinity.export.from_checkpoint import ExportSettings, export_checkpoint
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.damage import flip_bit_behind
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.ranks import on_ranks
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
    assert_equal(loaded, {name: value.to(loaded[name].dtype) for name, value in expected.items()})


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
    fit(Buffered(untied), tmp_path / "untied", max_steps=1).save_checkpoint(tmp_path / "untied.ckpt")
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
        with refused(CheckpointError, match=named):
            evaluated_values(quiet_trainer(tmp_path), saved, recipe, strict=strict, module_class=module_class)
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


# ---- whole weights of one file


WHOLE = Recipe(precision="bf16-mixed", odd=True, frozen=True, validate=True)


def trainer(root: Path, *, load_full_weights: bool = True, **settings: Any) -> pl.Trainer:
    """Return a quiet Trainer with ``load_full_weights``."""
    strategy = SmartInfinityStrategy(root / "storage", load_full_weights=load_full_weights)
    return quiet_trainer(root, strategy, **{"max_steps": 3, "num_sanity_val_steps": 0, **settings})


@pytest.fixture(scope="module")
def saved_whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Return one file with the fp32 weights of a fitted model, from Lightning's converter, and its validation loss."""
    root = tmp_path_factory.mktemp("saved")
    module = Buffered(WHOLE)
    fitted = trainer(root, load_full_weights=False, max_steps=2)
    fitted.fit(module)
    fitted.save_checkpoint(root / "folder.ckpt")
    convert_zero_checkpoint_to_fp32_state_dict(root / "folder.ckpt", root / "full.ckpt")
    return root / "full.ckpt", fitted.validate(module, verbose=False)[0]["val_loss"]


def test_full_weights_are_validated_and_trained(saved_whole: tuple[Path, float], tmp_path: Path) -> None:
    """validate(ckpt_path=file) in a fresh Trainer gives the fitted model's loss, and fit goes on from its step.

    Both refuse a file with a flipped bit, from Lightning's converter and from ``smart-infinity export``.
    """
    path, loss = saved_whole
    module, trained = Buffered(WHOLE), Buffered(WHOLE)
    (result,) = trainer(tmp_path).validate(module, ckpt_path=str(path), verbose=False)
    assert result["val_loss"] == pytest.approx(loss, abs=1e-6)
    assert float(module.seen) == 2
    fitting = trainer(tmp_path)
    fitting.fit(trained, ckpt_path=str(path))
    assert (fitting.global_step, len(trained.losses), float(trained.seen)) == (3, 1, 3)
    weight = torch.load(path)["state_dict"]["model.norm.weight"]
    files = [Path(shutil.copy(path, tmp_path / "converted.ckpt")), tmp_path / "exported.ckpt"]
    export_checkpoint(path.with_name("folder.ckpt"), files[1], ExportSettings(to="lightning"))
    trainer(tmp_path).fit(Buffered(WHOLE), ckpt_path=str(files[1]))
    for damaged in files:
        flip_bit_behind(weight.numpy().tobytes()[:16], damaged)
        for run in (trainer(tmp_path).validate, trainer(tmp_path).fit):
            with pytest.raises(CheckpointError, match=rf"{damaged.name} is damaged: .*CRC"):
                run(Buffered(WHOLE), ckpt_path=str(damaged))


MISUSES: list[tuple[Callable[[Any], Any], str]] = [
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(3)), r"\(3,\)"),
    (lambda norm: safe_set_local_fp32_param(norm, torch.zeros(3)), r"\(3,\)"),
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(32, dtype=torch.int64)), "int64"),
    (lambda norm: safe_set_full_grad(norm, [0.0] * 32), "list"),
    (lambda norm: safe_get_full_optimizer_state(norm, "momentum_buffer"), "'exp_avg'"),
    (lambda norm: safe_set_full_optimizer_state(norm, torch.zeros(32), "step"), "'step'"),
    # A wrong size on rank 1 alone.
    (lambda norm: safe_set_full_fp32_param(norm, torch.zeros(32 + torch.distributed.get_rank())), r"\(33,\)"),
]


def load_full(out: Path) -> dict[str, Any]:
    """Load full fp32 weights on two processes, and make mistakes.

    Returns:
        The file's weights, masters, parameters and moments when training starts, and the steps with mistakes.
    """
    module, path = LitTiny(WHOLE), out / "full.ckpt"
    weights = {name: value * 1.2345 for name, value in module.state_dict().items()}
    seen: dict[str, Any] = {"weights": weights, "masters": {}, "params": {}, "moments": {}, "misused": []}

    def note(*_: Any) -> None:
        for name, param in module.named_parameters():
            seen["masters"][name] = safe_get_full_fp32_param(param)
            if param.requires_grad:
                seen["moments"][name] = safe_get_full_optimizer_state(param, "exp_avg")
            with deepspeed.zero.GatheredParameters(param):
                seen["params"][name] = param.detach().clone()

    def misuse(trainer: pl.Trainer, *_: Any) -> None:
        for call, named in MISUSES:
            with pytest.raises((ConfigError, UnsupportedError), match=named):
                call(module.model.norm.weight)
        seen["misused"].append(trainer.global_step)

    callback = LambdaCallback(on_train_start=note, on_train_batch_start=misuse)
    strategy = SmartInfinityStrategy(out / "storage", load_full_weights=True)
    trainer = quiet_trainer(out, strategy, devices=2, max_steps=1, callbacks=[callback])
    if trainer.global_rank == 0:
        counts = {"epoch": 0, "global_step": 0, "lr_schedulers": []}
        torch.save({"state_dict": weights, "pytorch-lightning_version": pl.__version__, **counts}, path)
    trainer.fit(module, ckpt_path=str(path))
    strategy.close()
    return seen


def test_full_weights_reach_every_rank(tmp_path: Path) -> None:
    """On two ranks masters equal the file's fp32 values bit for bit, parameters the rounded values; moments are zero.

    Wrong sizes, dtypes and names raise our own error on both ranks, also where rank 1 alone passes one.
    """
    for seen in on_ranks(load_full, tmp_path):
        for name, value in seen["params"].items():
            weight = seen["weights"][name]
            assert torch.equal(value, weight.bfloat16()), name
            assert seen["masters"][name] is None or torch.equal(seen["masters"][name], weight), name
        assert (
            [name for name, master in seen["masters"].items() if master is None] == ["model.positions.weight"]
            and all(bool((value == 0).all()) for value in seen["moments"].values())
            and seen["misused"] == [0]
        )


def with_more(checkpoint: dict[str, Any]) -> None:
    checkpoint["state_dict"]["model.extra.weight"] = torch.zeros(5)


MISFITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "without": (lambda checkpoint: checkpoint["state_dict"].pop("model.norm.weight"), r"model\.norm\.weight"),
    "with another shape": (
        lambda checkpoint: checkpoint["state_dict"].update({"model.norm.weight": torch.zeros(5)}),
        r"model\.norm\.weight",
    ),
    "with more": (with_more, r"model\.extra\.weight"),
    "without weights": (lambda checkpoint: checkpoint.pop("state_dict"), "state_dict"),
}


def validated(saved_whole: Path, change: Callable[[dict[str, Any]], object], root: Path, *, strict: bool = True) -> Any:
    """Return what a validation of a changed checkpoint logs."""
    checkpoint, module = torch.load(saved_whole, weights_only=False), Buffered(WHOLE)
    change(checkpoint)
    torch.save(checkpoint, root / "changed.ckpt")
    module.strict_loading = strict
    return trainer(root).validate(module, ckpt_path=str(root / "changed.ckpt"), verbose=False)[0]


@pytest.mark.parametrize("name", MISFITS)
def test_full_weights_that_do_not_fit_are_refused(name: str, saved_whole: tuple[Path, float], tmp_path: Path) -> None:
    """Missing, misshapen, extra or no weights raise an error. Stock loads what fits without a message."""
    change, named = MISFITS[name]
    with refused(CheckpointError, match=named):
        validated(saved_whole[0], change, tmp_path)


def test_keys_may_differ_where_loading_is_not_strict(saved_whole: tuple[Path, float], tmp_path: Path) -> None:
    """strict_loading=False ignores a key that the model lacks."""
    assert validated(saved_whole[0], with_more, tmp_path, strict=False)["val_loss"] == pytest.approx(
        saved_whole[1], abs=1e-6
    )


# ---- save_weights_only=True saves the masters alone, for evaluation and for a new start


VALIDATED = Recipe(precision="bf16-mixed", max_steps=3, validate=True)


def test_weights_only_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has a third of the size.

    It evaluates and converts to one file, but a fit refuses to resume from it.
    """
    callback = ModelCheckpoint(
        tmp_path / "checkpoints", filename="{step}", every_n_train_steps=3, save_weights_only=True, save_top_k=-1
    )
    module = LitTiny(VALIDATED)
    trainer = quiet_trainer(tmp_path, enable_checkpointing=True, callbacks=[callback])
    trainer.fit(module)
    path = tmp_path / "checkpoints" / "step=3.ckpt"
    trainer.save_checkpoint(tmp_path / "whole.ckpt")
    masters = {
        name: trainer.strategy.optimizers[0].get_full_hp_param(param).clone()  # type: ignore[attr-defined]
        for name, param in module.model.named_parameters()
    }
    numel = sum(master.numel() for master in masters.values())
    (small,), (whole,) = (folder.rglob("*optim_states.pt") for folder in (path, tmp_path / "whole.ckpt"))
    assert small.stat().st_size < 5 * numel < 12 * numel < whole.stat().st_size

    (expected,) = quiet_trainer(tmp_path / "a").validate(module, ckpt_path=tmp_path / "whole.ckpt", verbose=False)
    (metrics,) = quiet_trainer(tmp_path / "b").validate(LitTiny(VALIDATED), ckpt_path=path, verbose=False)
    assert metrics == expected

    with pytest.raises(CheckpointError, match="weights only") as caught:
        quiet_trainer(tmp_path / "c", max_steps=4).fit(LitTiny(VALIDATED), ckpt_path=path)
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(caught.value.remedy.split("`")[1])[1:]) == 0
    exported = LitTiny.load_from_checkpoint("weights.ckpt", recipe=VALIDATED, weights_only=True)
    assert_equal(dict(exported.model.named_parameters()), masters)
