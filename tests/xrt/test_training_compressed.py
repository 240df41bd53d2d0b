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
from tests.training.test_compression import select_on_cpu
from tests.xrt.cards import EmulatedCards
from tests.xrt.fits import Reporting, assert_same, on_cards, on_host, trained
from tests.xrt.test_training import BASE, RECIPES

pytestmark = [
    RunIf(xrt=True),
    pytest.mark.filterwarnings("ignore:.*is small for SmartSSDs"),
    pytest.mark.filterwarnings("ignore:.*is predicted to bring no gain"),
]

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


class Counting(Reporting):
    """Counts the traffic of its steps, and lets a card fail after each step if ``failing`` is given."""

    failing: EmulatedCards | None = None

    def on_train_start(self) -> None:
        self.before = self.trainer.strategy.traffic()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.failing is not None:
            self.failing.inject("abort", card=self.trainer.global_step % 2)

    def on_train_end(self) -> None:
        super().on_train_end()
        self.traffic = self.trainer.strategy.traffic() - self.before


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
def test_trains_as_on_the_host(
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
    module = Counting(recipe)
    module.failing = emulated_cards if fails else None
    trained(recipe, tmp_path / "cards", strategy, module)
    assert_same(module, expected)
    assert ("The host updates" in caplog.text) == fails
    assert fails or 0 < module.traffic.shared_write_bytes < MOST_BYTES[codec] * module.traffic.numel
    assert all(emulated_cards.counter("runs_completed", card) >= recipe.max_steps for card in range(2))


def test_selecting_on_a_device(emulated_cards: EmulatedCards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cards begin with what torch has selected, as on a GPU, while it selects more."""
    expected = trained(BASE, tmp_path / "host", compressed_on_host(tmp_path, CODECS["top"]))
    select_on_cpu(monkeypatch)
    strategy = on_cards(emulated_cards, tmp_path / "cards", compression=CODECS["top"])
    assert_same(trained(BASE, tmp_path / "cards", strategy), expected)
