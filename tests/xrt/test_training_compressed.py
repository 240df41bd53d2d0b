"""With compressed gradients two emulated cards train the same bits as the host, and receive few bytes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from lightning_smartinfinity import BlockScaled, SmartInfinityStrategy, TopK
from lightning_smartinfinity.common.update_rules import RULES
from lightning_smartinfinity.settings import GradientCodec
from tests.helpers.long_cases import long_but
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

CODECS = {"top": TopK(0.05), "8 bits": BlockScaled(), "8 bits alone": BlockScaled(error_feedback=False)}


def compressed_on_host(root: Path, codec: GradientCodec) -> SmartInfinityStrategy:
    strategy = on_host(root)
    strategy._settings = dataclasses.replace(strategy._settings, compression=codec)
    return strategy


@pytest.mark.parametrize("route", long_but(["storage"], ["host", "storage"]))
@pytest.mark.parametrize(
    ("name", "precision", "codec"),
    long_but(
        [("AdamW", "bf16-mixed", "top"), ("AdamW", "bf16-mixed", "8 bits"), ("SGD", "32-true", "8 bits alone")],
        [
            ("AdamW", "bf16-mixed", "top"),
            ("AdamW", "16-mixed", "top"),
            *((rule.optimizers[0], "32-true", "top") for rule in RULES),
            ("AdamW", "bf16-mixed", "8 bits"),
            ("SGD", "32-true", "8 bits alone"),
        ],
    ),
)
def test_trains_as_on_the_host(
    emulated_cards: EmulatedCards, tmp_path: Path, name: str, precision: str, codec: str, route: str
) -> None:
    """Every optimizer, precision and route gives the host's bits; the cards update, and get payloads alone."""
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    expected = trained(recipe, tmp_path / "host", compressed_on_host(tmp_path, CODECS[codec]))
    config = {"gradient_route": route}
    strategy = on_cards(emulated_cards, tmp_path / "cards", overlap="forward", compression=CODECS[codec], config=config)
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
    # An accumulated element has 4 bytes. The cards get a twentieth of the elements with 2 bytes of index each, or one
    # byte for each element, and some beats for each tasklet.
    assert 0 < traffic.shared_write_bytes < (0.5 if codec == "top" else 1.25) * traffic.numel
    assert all(emulated_cards.counter("runs_completed", card) >= recipe.max_steps for card in range(2))


def test_selecting_on_a_device(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards begin with what torch has selected, as on a GPU, while it selects more."""
    expected = trained(BASE, tmp_path / "host", compressed_on_host(tmp_path, CODECS["top"]))
    select_on_cpu(monkeypatch)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODECS["top"])
    assert_same(trained(BASE, tmp_path / "cards", strategy), expected)


@pytest.mark.parametrize("codec", long_but(["top"], ["top", "8 bits"]))
def test_cards_that_fail(
    emulated_cards: EmulatedCards, tmp_path: Path, caplog: pytest.LogCaptureFixture, codec: str
) -> None:
    """The host compresses once more what it takes over, to the same bits; the residual changes only once."""
    recipe = dataclasses.replace(BASE, precision="bf16-mixed")
    expected = trained(recipe, tmp_path / "host", compressed_on_host(tmp_path, CODECS[codec]))

    class Failing(Reporting):
        def on_train_batch_end(self, *args: Any) -> None:
            emulated_cards.inject("abort", card=self.trainer.global_step % 2)

    module = Failing(recipe)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODECS[codec])
    fit(module, tmp_path, strategy, max_steps=recipe.max_steps, accumulate_grad_batches=recipe.accumulate)
    strategy.close()
    assert_same(module, expected)
    assert "The host updates" in caplog.text
