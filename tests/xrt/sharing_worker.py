"""Runs :mod:`tests.training.worker` and records how much of the emulated cards' memory each rank holds.

``card_bytes`` lists, by card, the memory of the cards of the rank's own process.
"""

from __future__ import annotations

from typing import Any

from tests.training import worker
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

_CARDS = EmulatedCards(build())


class Sharing(worker.Recorder):
    """Looks at the cards when training ends, before they are closed."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        self.extra["card_bytes"] = [_CARDS.counter("card_bytes", card) for card in range(2)]


if __name__ == "__main__":
    worker.Recorder = Sharing  # type: ignore[misc]
    worker.main()
