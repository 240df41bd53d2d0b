"""Trainer and Fabric train the same bits on two emulated cards as on the host."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric import Fabric

from lightning_smartinfinity import (
    SmartInfinityFabricStrategy,
    StorageFullError,
)
from lightning_smartinfinity.devices.smartssd import device
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.storage import SpaceRequest, require_space
from lightning_smartinfinity.zero3.setup import open_storage as storage
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit, quiet_trainer
from tests.xrt.cards import EmulatedCards
from tests.xrt.fits import SMALL_RING, Reporting, assert_same, on_cards, on_host, trained
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
