"""Trainer and Fabric train the same bits on two emulated cards as on the host, also with compressed gradients."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback

from lightning_smartinfinity import (
    BlockScaled,
    DeviceError,
    SmartInfinityStrategy,
    SmartSSDConfig,
    StorageFullError,
    TopK,
    TransferConfig,
)
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.devices.smartssd import device, worker
from lightning_smartinfinity.devices.smartssd.gradient_files import open_gradient_file
from lightning_smartinfinity.settings import GradientCodec
from lightning_smartinfinity.storage import SpaceRequest, require_space
from lightning_smartinfinity.zero3.setup import open_storage as storage
from tests.fabric import worker as fabric
from tests.helpers.assertions import differing
from tests.helpers.long_cases import long_but
from tests.helpers.models import LitTiny, Recipe
from tests.helpers.native_testing import Hold
from tests.helpers.runif import RunIf
from tests.helpers.trainers import quiet_trainer
from tests.helpers.waiting import LIMIT, lenient
from tests.training.test_compression import select_on_cpu
from tests.xrt.cards import EmulatedCards
from tests.xrt.long_fit import compare

pytestmark = [
    RunIf(xrt=True),
    pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs"),
    pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain"),
]

SMALL_RING = TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3)


def arrays_of(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Return every array of every parameter."""
    handler = trainer.strategy._training_optimizer.update.drained_handler()
    arrays = [handler.state.read_parameter(index) for index in range(len(handler.steps))]
    return [{name: torch.from_numpy(values.copy()) for name, values in each.items()} for each in arrays]


class Reporting(LitTiny):
    """Keeps its final state, which it reads before the storage is closed."""

    arrays: list[dict[str, torch.Tensor]]
    resumed: Path | None = None  # the checkpoint that it goes on from

    def on_train_end(self) -> None:
        self.arrays = arrays_of(self.trainer)


def on_cards(cards: EmulatedCards, root: Path, **settings: Any) -> SmartInfinityStrategy:
    """Return a strategy for two cards; ``config`` has settings of SmartSSDConfig."""
    config = SmartSSDConfig(xclbin=cards.build.xclbin, **settings.pop("config", {}))
    return SmartInfinityStrategy(
        [root / "ssd0", root / "ssd1"],
        **{"update_device": "smartssd", "smartssd": config, "transfer": SMALL_RING, "overlap": "none", **settings},
    )


def on_host(root: Path) -> SmartInfinityStrategy:
    return SmartInfinityStrategy(root / "disk", update_device="host", transfer=SMALL_RING, overlap="none")


def trained(recipe: Recipe, root: Path, strategy: SmartInfinityStrategy, module: Any = None, **settings: Any) -> Any:
    """Fit a module, by default one that reports, close the strategy and return the module."""
    module = module or Reporting(recipe)
    of_recipe = {
        "precision": recipe.precision,
        "max_steps": recipe.max_steps,
        "accumulate_grad_batches": recipe.accumulate,
        "gradient_clip_val": recipe.clip,
    }
    quiet_trainer(root, strategy, **{**of_recipe, **settings}).fit(module, ckpt_path=module.resumed)
    strategy.close()
    return module


def assert_same(module: Reporting, expected: Reporting) -> None:
    """Assert equal losses and equal arrays of every parameter."""
    assert module.losses == expected.losses and same_arrays(module.arrays, expected.arrays)


def same_arrays(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> bool:
    """Return whether all arrays are equal bit for bit."""
    return len(found) == len(expected) and all(
        differing(mine, theirs) == [] for mine, theirs in zip(found, expected, strict=True)
    )


# It has what Lightning adds to a step, and a parameter that some steps do not use.
BASE = Recipe(groups=True, scheduler="step", skip_side_at=(1,), depth=1, max_steps=4, accumulate=2)
RECIPES = {
    "AdamW": BASE,
    # Its weight_decay is L2, and its beta takes the second branch of torch's lerp.
    "Adam": dataclasses.replace(BASE, optimizer="Adam", optimizer_kwargs={"betas": (0.4, 0.99), "maximize": True}),
    "Adagrad": dataclasses.replace(BASE, optimizer="Adagrad", clip=0.3, optimizer_kwargs={"lr_decay": 0.1}),
    "SGD": dataclasses.replace(
        BASE, optimizer="SGD", lr=0.1, eps=None, optimizer_kwargs={"momentum": 0.9, "nesterov": True}
    ),
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
    settings: dict[str, Any] = {"precision": recipe.precision, "accumulate_grad_batches": recipe.accumulate}
    for number, strategy in enumerate(strategies):
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
    recipe = Recipe(depth=1, precision="bf16-mixed", max_steps=1)

    def train(folder: Path) -> None:
        trained(recipe, folder, on_cards(emulated_cards, folder, config={"gradient_route": "storage"}))

    with mock.patch.object(device, "open_gradient_file", side_effect=open_gradient_file) as make:
        train(tmp_path / "enough")
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
        train(tmp_path / "too-little")
    assert not list((tmp_path / "too-little").rglob("*.bin"))


def test_fabric(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an xclbin in the environment, a user's own loop in Fabric takes the card by itself, and loses no bit."""
    monkeypatch.setenv("SMART_INFINITY_XCLBIN", str(emulated_cards.build.xclbin))
    recipe, found = Recipe(depth=1, max_steps=3, precision="bf16-mixed"), {}
    for place in ("host", "auto"):
        ring, options = {"tasklet_bytes": 64 * 1024, "num_buffers": 3}, {"update_device": place}
        found[place] = fabric.train(fabric.Run(str(tmp_path / place), recipe, transfer=ring, options=options))
    assert found["auto"].losses == found["host"].losses and found["host"].losses[0] != found["host"].losses[2]
    assert found["host"].masters and same_arrays([found["auto"].masters], [found["host"].masters])
    assert emulated_cards.counter("runs_completed") >= SELF_TEST + 3


# ---- cards that fail at any point of a fit, with or without their SSD, leave the host's bits or a clear error


RECIPE = Recipe(precision="bf16-mixed", depth=1, groups=True, scheduler="step", validate=True, max_steps=4)


class Failing(Reporting):
    """Calls ``fail`` at one moment of its training, and keeps its final state."""

    def __init__(self, moment: str, fail: Any, folder: Path) -> None:
        super().__init__(RECIPE)
        self.moment, self.fail, self.folder = moment, fail, folder
        self.resumed = folder / "half.ckpt" if moment == "resumed" else None

    def at(self, moment: str, is_now: bool = True) -> None:
        if is_now and moment == self.moment:
            self.fail(self.trainer)

    def on_train_start(self) -> None:
        self.at("first step")

    def on_train_batch_start(self, *_: Any) -> None:
        self.at("last step", self.trainer.global_step == RECIPE.max_steps - 1)

    def on_validation_start(self) -> None:
        self.at("validation", not self.trainer.sanity_checking)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.at("save")

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_step == 2:
            self.trainer.save_checkpoint(self.folder / "half.ckpt")

    def on_train_end(self) -> None:
        super().on_train_end()
        self.at("end")


def fitted(root: Path, strategy: SmartInfinityStrategy, module: Failing, **settings: Any) -> Any:
    return trained(RECIPE, root, strategy, module, val_check_interval=2, **settings)


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

    def fail(trainer: Any) -> None:
        emulated_cards.lose(1) if kind == "lost" else emulated_cards.inject(kind, card=1)

    for moment in moments:
        emulated_cards.reset()
        caplog.clear()
        root, config = tmp_path / moment, {"timeout": lenient() if kind == "hang" else LIMIT}
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


# ---- compressed gradients: the same bits as the host's, and few bytes


CODECS: dict[str, GradientCodec] = {
    "top": TopK(0.05),
    "top, fp16": TopK(0.05, value_dtype="fp16"),
    "all": TopK(1.0),  # its payload is larger than the gradient
    "8 bits": BlockScaled(),
    "8 bits alone": BlockScaled(error_feedback=False),
}
# An accumulated element has 4 bytes. The cards get a twentieth of the elements with 2 bytes of index each, or one byte
# for each element, and some beats for each tasklet.
MOST_BYTES = {"top": 0.5, "top, fp16": 0.4, "all": 6.1, "8 bits": 1.25, "8 bits alone": 1.25}


def compressed_on_host(root: Path, codec: GradientCodec) -> SmartInfinityStrategy:
    strategy = on_host(root)
    strategy._settings = dataclasses.replace(strategy._settings, compression=codec)
    return strategy


@pytest.mark.parametrize("route", long_but(["storage"], ["host", "storage"]))
@pytest.mark.parametrize(
    ("name", "precision", "codec", "fails"),
    long_but(
        [("AdamW", "bf16-mixed", "top, fp16", True), ("SGD", "32-true", "8 bits alone", False)],
        [
            *(("AdamW", "bf16-mixed", codec, fails) for codec in ("top, fp16", "8 bits") for fails in (False, True)),
            ("AdamW", "16-mixed", "top", False),
            ("AdamW", "bf16-mixed", "all", True),
            *((rule.optimizers[0], "32-true", "top", False) for rule in RULES),
            ("SGD", "32-true", "8 bits alone", False),
        ],
    ),
)
def test_trains_with_compressed_gradients(
    emulated_cards: EmulatedCards,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    precision: str,
    codec: str,
    fails: bool,
    route: str,
) -> None:
    """Every optimizer, precision and route gives the host's bits; the cards update, and get payloads alone.

    If a card fails, the host compresses once more what it takes over, and the residual changes only once.
    """
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    expected = trained(recipe, tmp_path / "host", compressed_on_host(tmp_path, CODECS[codec]))
    config = {"gradient_route": route}
    strategy = on_cards(emulated_cards, tmp_path / "cards", overlap="forward", compression=CODECS[codec], config=config)
    traffic: list[Any] = []
    watch = LambdaCallback(
        on_train_start=lambda *_: traffic.append(strategy.traffic()),
        on_train_batch_end=lambda trainer, *_: fails and emulated_cards.inject("abort", card=trainer.global_step % 2),
        on_fit_end=lambda *_: traffic.append(strategy.traffic()),  # the last step has ended by then
    )
    assert_same(trained(recipe, tmp_path / "cards", strategy, callbacks=[watch]), expected)
    assert ("The host updates" in caplog.text) == fails
    moved = traffic[1] - traffic[0]
    assert fails or 0 < moved.shared_write_bytes < MOST_BYTES[codec] * moved.numel
    assert all(emulated_cards.counter("runs_completed", card) >= recipe.max_steps for card in range(2))


def test_selecting_on_a_device(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards begin with what torch has selected, as on a GPU, while it selects more."""
    expected = trained(BASE, tmp_path / "host", compressed_on_host(tmp_path, CODECS["top"]))
    select_on_cpu(monkeypatch)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODECS["top"])
    assert_same(trained(BASE, tmp_path / "cards", strategy), expected)
