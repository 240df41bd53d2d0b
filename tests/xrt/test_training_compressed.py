"""Compressed gradients to two emulated cards: to the bit what they train on the host, and few bytes down."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import BlockScaled, ConfigError, SmartInfinityStrategy, TopK
from tests.helpers.runif import RunIf
from tests.helpers.trainers import fit
from tests.training.test_compression import select_on_cpu
from tests.xrt.cards import EmulatedCards
from tests.xrt.test_training import BASE, RECIPES, Reporting, assert_same, on_cards, on_host, trained

pytestmark = [
    RunIf(xrt=True),
    pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs"),
    pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain"),
]

CODEC = TopK(0.05)


def compressed_on_host(root: Path) -> SmartInfinityStrategy:
    strategy = on_host(root)
    strategy._compression = CODEC
    return strategy


@pytest.mark.parametrize("route", ["host", "storage"])
@pytest.mark.parametrize(
    ("name", "precision"), [("AdamW", "bf16-mixed"), ("AdamW", "16-mixed"), ("SGD", "32-true"), ("Adagrad", "32-true")]
)
def test_trains_as_on_the_host(
    emulated_cards: EmulatedCards, tmp_path: Path, name: str, precision: str, route: str
) -> None:
    """Whatever the optimizer, the precision and the route; the cards update, and get payloads alone."""
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    expected = trained(recipe, tmp_path / "host", compressed_on_host(tmp_path))
    strategy = on_cards(
        emulated_cards, tmp_path / "cards", overlap="forward", compression=CODEC, config={"gradient_route": route}
    )
    counted: list[Any] = []

    class Counting(Reporting):
        def on_train_start(self) -> None:
            counted.append(strategy.traffic())

        def on_train_end(self) -> None:
            super().on_train_end()
            counted.append(strategy.traffic())

    module = Counting(recipe)
    fit(
        module,
        tmp_path,
        strategy,
        precision=precision,
        max_steps=recipe.max_steps,
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip,
    )
    strategy.close()
    assert_same(module, expected)
    traffic = counted[1] - counted[0]
    # Of 4 bytes, accumulated: a twentieth of the elements with 2 bytes of index, and some beats for each tasklet.
    assert 0 < traffic.shared_write_bytes < 0.5 * traffic.numel
    assert all(emulated_cards.counter("runs_completed", card) >= recipe.max_steps for card in range(2))


def test_selecting_on_a_device(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards begin with what torch has selected, as on a GPU, while it selects more."""
    expected = trained(BASE, tmp_path / "host", compressed_on_host(tmp_path))
    select_on_cpu(monkeypatch)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODEC)
    assert_same(trained(BASE, tmp_path / "cards", strategy), expected)


def test_cards_that_fail(emulated_cards: EmulatedCards, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the host takes over it compresses once more, to the same bits; the residual moves once."""
    recipe = dataclasses.replace(BASE, precision="bf16-mixed")
    expected = trained(recipe, tmp_path / "host", compressed_on_host(tmp_path))

    class Failing(Reporting):
        def on_train_batch_end(self, *args: Any) -> None:
            emulated_cards.inject("abort", card=self.trainer.global_step % 2)

    module = Failing(recipe)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODEC)
    fit(module, tmp_path, strategy, max_steps=recipe.max_steps, accumulate_grad_batches=recipe.accumulate)
    strategy.close()
    assert_same(module, expected)
    assert "The host updates" in caplog.text


def test_a_codec_that_cards_do_not_read(
    emulated_cards: EmulatedCards, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Is refused where cards are asked for; by "auto" the host updates, and the log says why."""
    with pytest.raises(ConfigError, match=r"cannot read compression=BlockScaled.*TopK"):
        trained(BASE, tmp_path, on_cards(emulated_cards, tmp_path, compression=BlockScaled()))
    with caplog.at_level(logging.INFO):
        strategy = on_cards(emulated_cards, tmp_path, compression=BlockScaled(), update_device="auto")
        trained(BASE, tmp_path, strategy, max_steps=1)
    assert "SmartSSDs cannot read BlockScaled" in caplog.text
