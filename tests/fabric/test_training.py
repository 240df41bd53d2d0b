"""A Fabric loop trains like plain torch, also beside second models, and a resumed one as an uninterrupted one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_smartinfinity import CheckpointError
from lightning_smartinfinity.zero3.checkpoints.formats.found_checkpoint import FoundCheckpoint
from tests.fabric.worker import Run, launch, quiet_fabric, train
from tests.helpers import reference
from tests.helpers.assertions import assert_equal, refused
from tests.helpers.long_cases import long_but
from tests.helpers.models import Recipe
from tests.helpers.ranks import on_ranks
from tests.helpers.trainers import fit
from tests.helpers.universal import convert
from tests.training.small import Small
from tests.training.test_parity import assert_near
from tests.training.test_resume import assert_same
from tests.training.worker import Outcome

PRECISIONS = ["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
USUAL = ("32-true", "bf16-true", "16-mixed")
# The recipe has parameter groups, a step scheduler, windows of two micro-batches and of one, clipping, and unused
# parameters.
EVERYTHING = Recipe(
    groups=True, scheduler="step", clip=0.3, accumulate=2, epoch_batches=3, skip_side_at=(1, 2), max_steps=5, depth=1
)
RESUME_AT = 2


def _run(out: Path, precision: str, *, devices: int = 1) -> Run:
    recipe = dataclasses.replace(EVERYTHING, precision=precision)
    # In fp16 the scale settles after the checkpoint, so that it must be resumed, too.
    options: dict[str, Any] = {"initial_scale_power": 22, "hysteresis": 1} if precision.startswith("16") else {}
    # The state format must not affect what is resumed.
    options["state_format"] = "bf16" if precision == "bf16-true" else "fp32"
    return Run(out=str(out), recipe=recipe, devices=devices, save_at=(RESUME_AT,), options=options)


def _resumed(run: Run) -> Run:
    """Return a run that resumes from another run's checkpoint with another ring."""
    return dataclasses.replace(
        run,
        out=f"{run.out}-resumed",
        save_at=(),
        resume=str(Path(run.out) / f"step-{RESUME_AT}.ckpt"),
        transfer={"tasklet_bytes": 64 * 1024, "num_buffers": 3},
    )


def assert_equals_torch(outcome: Outcome, recipe: Recipe, *, world_size: int = 1) -> None:
    """Assert that losses and masters equal a plain torch loop that skips the same steps."""
    expected = reference.train(recipe, world_size=world_size, skipped=outcome.extra["skipped"])
    assert_near(outcome.losses, outcome.masters, expected, recipe.precision)
    assert outcome.extra["state_entries"] == 0


def assert_goes_on(resumed: Outcome, straight: Outcome) -> None:
    """Assert that everything after the checkpoint is equal bit for bit."""
    assert 0 < len(resumed.losses) < len(straight.losses)
    assert_same(resumed, straight, first_loss=len(straight.losses) - len(resumed.losses))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, tuple[Run, Outcome]]:
    """Train on one process in every precision of these tests."""
    root = tmp_path_factory.mktemp("alone")
    precisions = PRECISIONS if request.config.getoption("long") else USUAL
    runs = [_run(root / precision, precision) for precision in precisions]
    return {run.recipe.precision: (run, train(run)) for run in runs}


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Run, Outcome]]:
    """Train on two processes; the last run sees a NaN on one rank."""
    root = tmp_path_factory.mktemp("together")
    runs = [_run(root / precision, precision, devices=2) for precision in ("16-mixed",)]
    not_finite = Recipe(precision="bf16-mixed", eps=1e-3, nan_at=(1,), nan_rank=1, max_steps=3, depth=1)
    runs.append(dataclasses.replace(runs[0], out=str(root / "nan"), recipe=not_finite, save_at=()))
    names = [*(run.recipe.precision for run in runs[:-1]), "nan"]
    return dict(zip(names, zip(runs, launch(*runs), strict=True), strict=True))


@pytest.mark.parametrize("precision", long_but(USUAL, PRECISIONS))
def test_every_precision_trains_like_torch(precision: str, alone: dict[str, tuple[Run, Outcome]]) -> None:
    """A loop that accumulates, clips and schedules gets the losses and masters of plain torch."""
    run, outcome = alone[precision]
    assert_equals_torch(outcome, run.recipe)
    assert bool(outcome.extra["skipped"]) == precision.startswith("16"), "the scale was to overflow in fp16"


@pytest.mark.parametrize("name", ["16-mixed", "nan"])
def test_two_processes_train_like_torch(name: str, together: dict[str, tuple[Run, Outcome]]) -> None:
    """Two ranks equal plain torch on the batches of both, and a NaN on one rank skips the step on both."""
    run, outcome = together[name]
    assert_equals_torch(outcome, run.recipe, world_size=2)
    assert name != "nan" or outcome.extra["skipped"] == [1]


@pytest.mark.parametrize("how", ["alone", "together"])
def test_resume_in_fresh_processes_is_bit_exact(how: str, request: pytest.FixtureRequest) -> None:
    """Model, optimizer, scheduler, loss scale and the loop's own counter resume in every precision, and on ranks."""
    pairs = [pair for name, pair in request.getfixturevalue(how).items() if name != "nan"]
    resumed = launch(*(_resumed(run) for run, _ in pairs))
    for outcome, (_, straight) in zip(resumed, pairs, strict=True):
        assert_goes_on(outcome, straight)


RECIPE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), max_steps=2)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Outcome]:
    """Return a checkpoint of a loop's last step, and the loop's outcome."""
    outcome = train(Run(out=str(tmp_path / "a"), recipe=RECIPE, save_at=(2,)))
    return tmp_path / "a" / "step-2.ckpt", outcome


def set_up(root: Path) -> tuple[Any, Any, Any, Any]:
    fabric = quiet_fabric(root / "storage")
    module, model, optimizer = RECIPE.set_up(fabric)
    return fabric, module, model, optimizer.engine


def test_fabric_loads_the_weights_of_a_universal_checkpoint_alone(saved: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Masters and parameters take the checkpoint's values, and step counts stay at zero."""
    path, outcome = saved
    fabric, module, model, engine = set_up(tmp_path)
    fabric.load(convert(path), {"model": model})
    assert_equal({n: engine.optimizer.get_full_hp_param(p) for n, p in module.named_parameters()}, outcome.masters)
    assert_equal({n: p.ds_tensor.view(p.ds_shape) for n, p in module.named_parameters()}, outcome.masters)
    assert not engine.optimizer.update.drained_handler().steps.any()


def test_the_engine_loads_it_as_transformers_and_accelerate_ask(
    saved: tuple[Path, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own method returns path and client state; it loads everything, or refuses to load a part."""
    path, outcome = saved
    fabric, module, _, engine = set_up(tmp_path)
    monkeypatch.setattr(FoundCheckpoint, "is_of_as_many", False)
    with refused(CheckpointError, match="another number of processes", remedy="load_module_only"):
        engine.load_checkpoint(str(path), load_module_only=True)
    assert engine.global_steps == 0
    found, client_state = engine.load_checkpoint(
        str(path), load_module_strict=True, load_optimizer_states=True, load_lr_scheduler_states=True
    )
    assert (Path(found), client_state["step"], engine.global_steps) == (
        path / "checkpoint",
        2,
        2,
    ) and engine.optimizer.update.drained_handler().steps.tolist() == outcome.extra["steps"]
    assert_equal({n: engine.optimizer.get_full_hp_param(p) for n, p in module.named_parameters()}, outcome.masters)
    fabric.strategy.close()


# ---- models that ZeRO-3 partitioned while they were built, and that no engine was set up for, still answer


def network(seed: int) -> nn.Sequential:
    """Return a network with an inner one."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Sequential(nn.Tanh(), nn.Linear(16, 16)), nn.Linear(16, 3))


def loss_of(model: nn.Module, teachers: list[nn.Sequential], step: int) -> torch.Tensor:
    """Return the distance to all teachers, of which the last is asked in parts first."""
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
    with torch.no_grad():
        *_, last = teachers
        answers = [last[2](last[1](last[0](rows))), *(teacher(rows) for teacher in teachers)]
    return sum((model(rows) - answer).square().mean() for answer in answers)  # type: ignore[return-value]


def taught(model: Any, optimizer: Any, teachers: list[nn.Sequential], backward: Callable[..., Any]) -> list[float]:
    losses = []
    for step in range(3):
        loss = loss_of(model, teachers, step)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_losses() -> list[float]:
    """Return the losses of plain torch."""
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return taught(model, optimizer, [network(1), network(2)], torch.Tensor.backward)


def train_on_ranks(root: Path) -> list[float]:
    """Return the losses of a student whose teachers Fabric did not set up."""
    fabric = quiet_fabric(root / "storage", devices=2)
    with fabric.init_module():
        teachers = [network(1), network(2)]
    parameters: list[Any] = [param for teacher in teachers for param in teacher.parameters()]
    assert all(param.ds_status.name == "NOT_AVAILABLE" for param in parameters), "nothing is partitioned"
    net = network(0)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    return taught(model, optimizer, teachers, partial(fabric.backward, model=model))


def test_a_second_model_on_two_processes(tmp_path: Path) -> None:
    """Two teachers of ``init_module``, one asked in parts first, answer on both ranks as in plain torch."""
    for losses in on_ranks(train_on_ranks, tmp_path):
        assert losses == pytest.approx(plain_losses(), abs=1e-6)


class Distilled(Small):
    """A student whose first teacher is its submodule, while the other one is kept out of it."""

    def configure_model(self) -> None:
        self.net, self.frozen = network(0), network(1).requires_grad_(False)
        self.others = [self.frozen, network(2)]  # a plain list is no submodule

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = loss_of(self.net, self.others, index)
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def test_teachers_of_configure_model(tmp_path: Path) -> None:
    """Within the LightningModule and out of it, they answer as in plain torch."""
    module = Distilled()
    fit(module, tmp_path, max_steps=3, precision="32-true", limit_val_batches=0)
    assert module.seen == pytest.approx(plain_losses(), abs=1e-6)
