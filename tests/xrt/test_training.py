"""Trainer and Fabric train the same bits on two emulated cards as on the host."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric

from lightning_smartinfinity import (
    DeviceError,
    SmartInfinityFabricStrategy,
    SmartInfinityStrategy,
    StorageFullError,
)
from lightning_smartinfinity.devices.smartssd import device, worker
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.storage import SpaceRequest, require_space
from lightning_smartinfinity.zero3.setup import open_storage as storage
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit, quiet_trainer
from tests.helpers.waiting import LIMIT, lenient
from tests.xrt.cards import EmulatedCards
from tests.xrt.fits import SMALL_RING, Reporting, arrays_of, assert_same, on_cards, on_host, same_arrays, trained
from tests.xrt.long_fit import compare

pytestmark = [
    RunIf(xrt=True),
    pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs"),
]

# It has what Lightning adds to a step, and a parameter that some steps do not use.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2)
SGD = dataclasses.replace(BASE, optimizer="SGD", lr=0.1, eps=None, optimizer_kwargs={"momentum": 0.9, "nesterov": True})
RECIPES = {
    "AdamW": BASE,
    # Its weight_decay is L2, and its beta takes the second branch of torch's lerp.
    "Adam": dataclasses.replace(BASE, optimizer="Adam", optimizer_kwargs={"betas": (0.4, 0.99), "maximize": True}),
    "Adagrad": dataclasses.replace(BASE, optimizer="Adagrad", clip=0.3, optimizer_kwargs={"lr_decay": 0.1}),
    "SGD": SGD,
    "RMSprop": dataclasses.replace(BASE, optimizer="RMSprop", optimizer_kwargs={"momentum": 0.9, "centered": True}),
}


# Runs of a kernel on each card: three for each type of gradients and parameters.
SELF_TEST = 9
OVERLAPS = ("none", "forward", "backward")


@pytest.mark.parametrize(
    ("name", "precision", "overlaps"),
    long_but(
        [("AdamW", "bf16-mixed", OVERLAPS), ("SGD", "32-true", ("forward",)), ("RMSprop", "16-mixed", ("forward",))],
        [
            *((name, "bf16-mixed", OVERLAPS) for name in RECIPES),
            ("AdamW", "32-true", OVERLAPS),
            *(
                (name, precision, ("forward",))
                for name in ("Adagrad", "SGD", "RMSprop")
                for precision in ("16-mixed", "32-true")
            ),
        ],
    ),
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_trains_as_on_the_host(
    emulated_cards: EmulatedCards, tmp_path: Path, name: str, precision: str, overlaps: tuple[str, ...]
) -> None:
    """Training gives the host's bits without overlap, during forward and within backward, all updated on the cards."""
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    expected = trained(recipe, tmp_path / "host", on_host(tmp_path))
    for overlap in overlaps:
        emulated_cards.reset()
        strategy = on_cards(emulated_cards, tmp_path / overlap, overlap=overlap)
        assert_same(trained(recipe, tmp_path / overlap, strategy), expected)
        assert all(emulated_cards.counter("runs_completed", card) >= SELF_TEST + recipe.max_steps for card in range(2))


@pytest.mark.parametrize(("size", "steps"), [("tiny", 2), pytest.param("124m", 4, marks=pytest.mark.long)])
def test_tasklets_of_the_usual_size(emulated_cards: EmulatedCards, tmp_path: Path, size: str, steps: int) -> None:
    """Tasklets of the default size give the host's bits."""
    compare(tmp_path, emulated_cards, size, steps=steps)


def test_resumes_on_cards_what_the_host_began(emulated_cards: EmulatedCards, tmp_path: Path) -> None:
    """Cards resume a checkpoint of the host, and the host one of the cards, with gradients by way of storage."""
    recipe = dataclasses.replace(BASE, precision="bf16-mixed", max_steps=6)
    straight = trained(recipe, tmp_path, on_host(tmp_path / "straight"))
    strategies = [
        on_host(tmp_path / "host"),
        on_cards(emulated_cards, tmp_path / "cards", config={"gradient_route": "storage"}),
        on_host(tmp_path / "again"),
    ]
    losses, checkpoint = [], None
    for number, strategy in enumerate(strategies):
        settings: dict[str, Any] = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
        trainer = quiet_trainer(tmp_path, strategy, max_steps=2 * number + 2, **settings)
        module = Reporting(recipe)
        trainer.fit(module, ckpt_path=checkpoint)
        losses += module.losses
        checkpoint = str(tmp_path / f"{number}.ckpt")
        trainer.save_checkpoint(checkpoint)
        strategy.close()
    module.losses = losses
    assert_same(module, straight)


def test_gradient_files_are_counted_before_anything_is_made(
    emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If one byte is missing for state and gradients, training does not begin, and the error names the other route."""
    asked: list[SpaceRequest] = []
    monkeypatch.setattr(storage, "require_space", asked.extend)
    recipe = Recipe(depth=1, precision="bf16-mixed")

    def train(name: str, route: str) -> None:
        strategy = on_cards(emulated_cards, tmp_path / name, config={"gradient_route": route})
        fit(LitTiny(recipe), tmp_path / name, strategy, max_steps=1, precision=recipe.precision)
        strategy.close()

    with mock.patch.object(device, "open_gradient_file", side_effect=open_gradient_file) as make:
        train("enough", "storage")
    gradients = [request.needed_bytes for request in asked if "gradients" in request.what]
    # On each card three buffers of 4096 elements.
    assert gradients == [call.args[1] for call in make.call_args_list] == 2 * [3 * 8 * 1024]
    monkeypatch.setattr(storage, "require_space", require_space)
    needed = sum(request.needed_bytes for request in asked)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=needed - 1, f_frsize=1))
    with pytest.raises(
        StorageFullError,
        match=r"The gradients on their way to SmartSSDs and the optimizer state need .*gradient_route='host'",
    ):
        train("too-little", "storage")
    assert not list((tmp_path / "too-little").rglob("*.bin"))


def test_fabric(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an xclbin in the environment, a user's own loop in Fabric takes the cards by itself, and loses no bit."""
    losses = []
    monkeypatch.setenv("SMART_INFINITY_XCLBIN", str(emulated_cards.build.xclbin))
    for place in ("host", "auto"):
        strategy = SmartInfinityFabricStrategy(
            [tmp_path / place / "a", tmp_path / place / "b"], transfer=SMALL_RING, update_device=place
        )
        fabric = Fabric(accelerator="cpu", devices=1, strategy=strategy, precision="bf16-mixed")
        fabric.launch()
        recipe = Recipe(depth=1)
        model = recipe.build_model()
        module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        for step in range(3):
            loss = module(recipe.batch(step))
            losses.append(float(loss.detach()))
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        strategy.close()
    assert losses[:3] == losses[3:] and losses[0] != losses[2]
    assert all(emulated_cards.counter("runs_completed", card) >= SELF_TEST + 3 for card in range(2))


# ---- cards that fail at any point of a fit, with or without their SSD, leave the host's bits or a clear error


RECIPE = Recipe(precision="bf16-mixed", depth=1, groups=True, scheduler="step", validate=True, max_steps=4)


class Failing(Reporting):
    """Calls ``fail`` at one moment of its training, and keeps its final state."""

    def __init__(self, moment: str, fail: Any, folder: Path) -> None:
        super().__init__(RECIPE)
        self.moment, self.fail, self.folder = moment, fail, folder
        self.resumed = folder / "half.ckpt" if moment == "resumed" else None

    def at(self, moment: str) -> None:
        if moment == self.moment:
            self.fail(self.trainer)

    def on_train_start(self) -> None:
        self.at("first step")

    def on_train_batch_start(self, *_: Any) -> None:
        if self.trainer.global_step == RECIPE.max_steps - 1:
            self.at("last step")

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self.at("validation")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("save")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.folder / "half.ckpt")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.at("end")


def fitted(root: Path, strategy: SmartInfinityStrategy, module: Failing, **settings: Any) -> Failing:
    settings = {"max_steps": RECIPE.max_steps, "val_check_interval": 2, **settings}
    quiet_trainer(root, strategy, **settings).fit(module, ckpt_path=module.resumed)
    strategy.close()
    return module


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Failing:
    """The module that the host trained."""
    folder = tmp_path_factory.mktemp("host")
    return fitted(folder, on_host(folder), Failing("never", None, folder))


MOMENTS = ("first step", "save", "validation", "last step", "end")


@pytest.mark.parametrize(
    ("kind", "overlap", "moments"),
    long_but(
        [("lost", "backward", ("save", "end"))],
        [
            ("lost", "backward", ("save", "end")),
            *itertools.product(("lost", "hang", "error"), ("none", "forward", "backward"), [MOMENTS]),
        ],
    ),
)
def test_at_every_moment(
    emulated_cards: EmulatedCards,
    tmp_path: Path,
    expected: Failing,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    overlap: str,
    moments: tuple[str, ...],
) -> None:
    """A failure at any moment leaves the host's bits, also in a training resumed from its checkpoint."""
    for moment in moments:
        emulated_cards.reset()
        caplog.clear()

        def fail(trainer: Any) -> None:
            if kind == "lost":
                emulated_cards.lose(1)
            else:
                emulated_cards.inject(kind, card=1)

        root = tmp_path / moment
        config = {"timeout": lenient() if kind == "hang" else LIMIT}
        with caplog.at_level(logging.WARNING):
            strategy = on_cards(emulated_cards, root, overlap=overlap, config=config)
            module = fitted(root, strategy, Failing(moment, fail, root))
        happened = "emulated card 1 failed: " in caplog.text and "The host updates its" in caplog.text
        assert happened == (moment != "end"), moment  # after the end nothing is asked of a card
        assert module.validated == expected.validated, moment
        assert_same(module, expected)
    emulated_cards.reset()
    root = tmp_path / "save"
    assert same_arrays(fitted(root, on_host(root), Failing("resumed", None, root)).arrays, expected.arrays)


@pytest.mark.parametrize("overlap", long_but(["forward"], ["none", "forward"]))
def test_a_write_that_does_not_return(
    emulated_cards: EmulatedCards, tmp_path: Path, expected: Failing, monkeypatch: pytest.MonkeyPatch, overlap: str
) -> None:
    """The fit ends with a DeviceError. Until the write returns, the step before can be read and saved."""
    monkeypatch.setattr(worker, "_RECOVERY", 0.0)
    late: list[tuple[Any, Hold]] = []

    def fail(trainer: Any) -> None:
        trainer.strategy.drain()
        device = trainer.strategy._training_optimizer.rank_state.handler._device
        late.append((device._workers[1].pipeline, Hold(device._workers[1].pipeline, write_at=0)))

    strategy = on_cards(emulated_cards, tmp_path, overlap=overlap, config={"timeout": lenient()})
    trainer = quiet_trainer(tmp_path, strategy, max_steps=RECIPE.max_steps, val_check_interval=2)
    module = Failing("last step", fail, tmp_path)
    with pytest.raises(DeviceError, match=r"card 1 has not returned from writing .*step before is whole"):
        trainer.fit(module)
    ((pipeline, hold),) = late
    trainer.save_checkpoint(tmp_path / "late.ckpt")
    found = arrays_of(trainer)
    assert pipeline.busy and pipeline.writes_out() and hold.count == 1
    assert strategy._training_optimizer.update.drained_handler().generation == RECIPE.max_steps - 1
    hold.release()
    strategy.close()
    shorter = Failing("never", None, tmp_path)
    fitted(tmp_path, on_host(tmp_path / "host"), shorter, max_steps=RECIPE.max_steps - 1)
    assert same_arrays(found, shorter.arrays) and not same_arrays(found, expected.arrays)
    # With overlap Lightning has already counted the step that was rolled back.
    assert trainer.global_step == RECIPE.max_steps - (overlap == "none")
    again = on_cards(emulated_cards, tmp_path / "again", overlap=overlap)
    resumed = quiet_trainer(tmp_path / "again", again, max_steps=RECIPE.max_steps, val_check_interval=2)
    resumed.fit(Failing("never", None, tmp_path), ckpt_path=tmp_path / "late.ckpt")
    assert same_arrays(arrays_of(resumed), expected.arrays if overlap == "none" else found)
    again.close()
