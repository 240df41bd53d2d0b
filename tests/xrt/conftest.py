from __future__ import annotations

from tests.xrt.fixtures import emulated_cards, emulated_cards_of_process

__all__ = ["emulated_cards", "emulated_cards_of_process"]
