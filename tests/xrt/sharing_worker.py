"""Runs of :mod:`tests.training.worker` that also tell what each rank holds of the emulated cards' memory.

That is of the cards of its own process, ``card_bytes`` by card.
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
