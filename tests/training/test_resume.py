"""Resuming in a fresh process equals an uninterrupted run bit for bit; state formats resume from each other."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from deepspeed.utils import safe_get_full_optimizer_state

from lightning_smartinfinity import CheckpointError
from tests.helpers import reference
from tests.helpers.assertions import assert_equal
from tests.helpers.hard_modules import grouped
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.trainers import quiet_trainer
from tests.helpers.universal import assert_same_tensors, convert_by_command
from tests.training.worker import Outcome, Run, launch, train

# Together the usual ones are all.
FEW, OTHERS = ["16-true"], ["32-true", "bf16-true", "bf16-mixed", "16-mixed"]
# Some precisions use a state format, since the format must not affect the resume.
FORMATS = {"16-true": "int8", "bf16-true": "int8_remainder", "16-mixed": "bf16"}


def assert_same(resumed: Outcome, straight: Outcome, *, first_loss: int) -> None:
    """Assert that losses from ``first_loss`` on, masters, counts, loss scale and rates are equal bit for bit."""
    assert resumed.losses == straight.losses[first_loss:]
    assert_equal(resumed.masters, straight.masters)
    for key in ("steps", "loss_scale", "lr"):
        assert resumed.extra[key] == straight.extra[key], key


@pytest.mark.parametrize(
    # One process with other precisions always runs in tests/fabric/test_training.py.
    ("devices", "precisions"),
    long_but([(2, FEW)], [(1, OTHERS), (2, FEW), (1, FEW), (2, OTHERS)]),
)
def test_resume_is_bit_exact_in_every_precision(devices: int, precisions: Sequence[str], tmp_path: Path) -> None:
    """A run that stops after three of six steps and resumes changes no bit, with other rings, sub-groups and buckets.

    The run has parameter groups, a scheduler, clipping, accumulation, a parameter unused for some steps and, in fp16, a
    dynamic loss scale that skips the first steps.
    """
    runs = [_run(tmp_path / "straight" / precision, precision, devices, save_at=(3,)) for precision in precisions]
    straight = launch(*runs)
    resumed = launch(
        *(
            dataclasses.replace(
                run,
                out=run.out.replace("straight", "resumed"),
                save_at=(),
                resume=str(Path(run.out) / "step-3.ckpt"),
                transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
                options={**run.options, "zero": {"sub_group_size": 3000, "reduce_bucket_size": 2000}},
            )
            for run in runs
        )
    )
    for precision, a, b in zip(precisions, resumed, straight, strict=True):
        assert_same(a, b, first_loss=3 * runs[0].recipe.accumulate)
        if precision.startswith("16"):
            assert b.extra["skipped"], "no step overflowed"


def _run(out: Path, precision: str, devices: int, *, save_at: tuple[int, ...]) -> Run:
    recipe = Recipe(
        precision=precision,
        groups=True,
        scheduler="step",
        clip=0.5,
        accumulate=2,
        skip_side_at=(1, 2, 4),
        max_steps=6,
    )
    options: dict[str, Any] = {"initial_scale_power": 22, "hysteresis": 1} if precision.startswith("16") else {}
    options["state_format"] = FORMATS.get(precision, "fp32")
    return Run(out=str(out), recipe=recipe, devices=devices, save_at=save_at, options=options)


RECIPE = Recipe(precision="bf16-mixed", groups=True, scheduler="step", clip=0.5, skip_side_at=(1,), max_steps=6)


NUM_BYTES = [("fp32", 12), ("int8_remainder", 6), ("bf16", 8), ("int8", 6), ("fp32", 12)]


def test_checkpoints_go_from_format_to_format(tmp_path: Path) -> None:
    """Each format resumes from the checkpoint of another one, and with each the losses stay near torch's.

    The run has groups, a scheduler, clipping and an unused parameter. The state takes two places of the format's size.
    """
    recipe = dataclasses.replace(RECIPE, max_steps=10)
    expected, found, checkpoint = torch.tensor(reference.train(recipe).losses), list[float](), None
    for step, (state_format, nbytes) in enumerate(NUM_BYTES, start=1):
        out, recipe = tmp_path / f"{step}", dataclasses.replace(RECIPE, max_steps=2 * step)
        run = Run(out=str(out), recipe=recipe, options={"state_format": state_format}, resume=checkpoint)
        module, trainer, recorder = train(dataclasses.replace(run, save_at=(2 * step,)))
        strategy: Any = trainer.strategy
        assert (
            2 * nbytes <= strategy.state_bytes / strategy.state_numel < 2 * nbytes + 3
            and recorder.extra["state_entries"] == 0
        )
        strategy.close()
        found += module.losses
        checkpoint = str(out / f"step-{2 * step}.ckpt")
    torch.testing.assert_close(torch.tensor(found), expected, atol=3e-2, rtol=0)


# ---- ordinary checkpoints resume on any number of processes, however many saved them


BASE = Recipe(groups=True, frozen=True, odd=True, scheduler="step", clip=0.5, skip_side_at=(1, 2, 4), max_steps=6)
ON_STORAGE = {"offload_param": {"device": "nvme"}, "stage3_param_persistence_threshold": 0, "sub_group_size": 3000}
SAVE_AT = 3


def passed_on(root: Path, recipe: Recipe, options: dict[str, Any], numbers: tuple[int, ...]) -> tuple[Run, Path]:
    """Train on one process, and pass what step 3 has saved to these numbers of processes and one again.

    Every stage loads and saves before any step, with sub-groups and a ring of its own. The last one goes on, with
    parameters on storage, and has to equal the first. What the stages save is compared as universal checkpoints.

    Returns:
        The first run, and the first checkpoint of those that several processes saved.
    """
    first = Run(out=str(root / "1"), recipe=recipe, options=options, save_at=(SAVE_AT,))
    straight, _, straight_recorder = train(first)
    if recipe.precision == "16-mixed":
        assert straight_recorder.skipped, "no step overflowed"
    saved = [root / "1" / f"step-{SAVE_AT}.ckpt"]
    for devices in numbers:
        passing = Run(
            out=str(root / str(devices)),
            recipe=dataclasses.replace(recipe, max_steps=SAVE_AT),
            devices=devices,
            resume=str(saved[-1]),
            save_after_fit=str(root / f"from-{devices}.ckpt"),
            transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
            options={**options, "zero": {"sub_group_size": 10**9 if devices == 3 else 3000}},
        )
        (outcome,) = launch(passing)
        assert outcome.output.count("random states are not restored") == 1
        saved.append(root / f"from-{devices}.ckpt")
    universal = [convert_by_command(path) for path in saved]
    for other in universal[1:]:
        assert_same_tensors(universal[0], other)
    back, _, back_recorder = train(
        Run(out=str(root / "back"), recipe=recipe, options={**options, "zero": ON_STORAGE}, resume=str(saved[-1]))
    )
    ends = (
        Outcome(of.losses, by.masters, by.extra, "")
        for of, by in ((back, back_recorder), (straight, straight_recorder))
    )
    assert_same(*ends, first_loss=SAVE_AT)
    return first, saved[1]


def test_state_survives_other_numbers_of_processes_to_the_bit(tmp_path: Path) -> None:
    """Passing from one process to two and one again, with other sub-groups and rings, changes no bit.

    ``test_another_number_of_processes`` goes on with three from a checkpoint. The run has groups, a scheduler, a
    parameter unused for some steps, a frozen one, parameters smaller than the number of ranks, and a loss scale that
    skips the first steps.
    """
    passed_on(
        tmp_path, dataclasses.replace(BASE, precision="16-mixed"), {"initial_scale_power": 22, "hysteresis": 1}, (2,)
    )


LONG = {
    "AdamW": dataclasses.replace(BASE, precision="bf16-mixed"),
    "Adam": dataclasses.replace(BASE, optimizer="Adam"),
    "Adagrad": dataclasses.replace(
        BASE,
        optimizer="Adagrad",
        precision="bf16-true",
        optimizer_kwargs={"lr_decay": 0.1, "initial_accumulator_value": 0.01},
    ),
    "SGD": dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None, optimizer_kwargs={"momentum": 0.9}),
    "RMSprop": dataclasses.replace(
        BASE, optimizer="RMSprop", precision="bf16-mixed", optimizer_kwargs={"centered": True, "momentum": 0.5}
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
def test_every_optimizer_survives_and_goes_on_as_from_a_universal_checkpoint(name: str, tmp_path: Path) -> None:
    """Three processes go on from what two saved with the bits with which they go on from its universal form."""
    first, saved = passed_on(tmp_path, LONG[name], {}, (2, 3))
    on = [
        dataclasses.replace(first, out=str(tmp_path / path.name / "on"), devices=3, save_at=(), resume=str(path))
        for path in (saved, convert_by_command(saved, tmp_path / "universal"))
    ]
    outcome, expected = launch(*on)
    assert_same(outcome, expected, first_loss=0)
    assert len(outcome.losses) == LONG["AdamW"].max_steps - SAVE_AT


# ---- empty parameter groups, such as "no decay" where only adapters are trained; model_runs.py trains with them, too


class Ordered(LitTiny):
    """A module with its groups in a given order (see :func:`grouped`), and a scheduler with a rate for each."""

    def __init__(self, order: str = "0w0b") -> None:
        super().__init__(Recipe(depth=1))
        self.order = order

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(grouped(list(self.named_parameters()), self.order), eps=1e-4)
        rates: list[Any] = [partial(pow, 0.5 + number / 8) for number in range(len(self.order))]
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, rates), "interval": "step"}]


def fitted(root: Path, module: Ordered, *, steps: int, ckpt_path: Path | None = None) -> pl.Trainer:
    trainer = quiet_trainer(root, max_steps=steps, precision="32-true")
    trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint after two steps of an optimizer whose first and third group are empty."""
    root = tmp_path_factory.mktemp("saved")
    trainer = fitted(root, Ordered(), steps=2)
    trainer.save_checkpoint(root / "two.ckpt")
    trainer.strategy.close()  # type: ignore[attr-defined]
    return root / "two.ckpt"


@pytest.mark.parametrize("converted_by", [None, convert_by_command])
def test_a_fit_with_empty_groups_resumes_exactly(converted_by: Any, saved: Path, tmp_path: Path) -> None:
    """Losses, rates and moments go on as those of a fit that never stopped, also from universal checkpoints."""
    if converted_by is not None:
        saved = converted_by(shutil.copytree(saved, tmp_path / "two.ckpt"))
    straight, resumed = Ordered(), Ordered()
    trainers = [
        fitted(tmp_path / "straight", straight, steps=4),
        fitted(tmp_path / "resumed", resumed, steps=4, ckpt_path=saved),
    ]
    assert resumed.losses == straight.losses[2:]
    rates = [[group["lr"] for group in trainer.optimizers[0].param_groups] for trainer in trainers]
    expected = [rate * (0.5 + number / 8) ** 4 for number, rate in enumerate([1.0, 1e-2, 1.0, 5e-3])]
    assert rates[0] == rates[1] == pytest.approx(expected)
    for name in ("weight", "bias"):
        moments = [
            safe_get_full_optimizer_state(getattr(module.model.side, name), "exp_avg") for module in (straight, resumed)
        ]
        assert torch.equal(*moments) and moments[0].any()


@pytest.mark.parametrize("order", ["w00b", "0wb", "0w0b0"])
def test_a_checkpoint_with_other_empty_groups_is_refused(order: str, saved: Path, tmp_path: Path) -> None:
    """The settings of an empty group would otherwise go to parameters, or the other way around."""
    with pytest.raises(CheckpointError, match="arameter group"):
        fitted(tmp_path, Ordered(order), steps=3, ckpt_path=saved)
