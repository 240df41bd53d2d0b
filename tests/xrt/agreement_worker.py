"""Records what ranks agree on, each with its own card: ``python -m tests.xrt.agreement_worker FOLDER``.

Every rank writes ``FOLDER/rank<n>.json``: its outcomes for ``update_device="smartssd"`` and ``"auto"``, each first
while rank 1's card computes wrongly, then while nothing is wrong.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

from lightning_smartinfinity import SmartInfinityError, SmartSSDConfig, TransferConfig
from lightning_smartinfinity.zero3.settings import OffloadSettings
from lightning_smartinfinity.zero3.setup.update_device import choose_update_device
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards

FIRST_MASTER = 1
"""Index of the pointer of ``sgd_update`` to the master weights."""


def outcome(folder: Path, cards: EmulatedCards, rank: int, wanted: str, *, failing: bool) -> list[str | int]:
    """Return who updates and how many processes share a card, or the error; then how many runs this rank's card had."""
    cards.reset()
    if failing and rank == 1:
        cards.inject("corrupt", card=rank, skipped=1, pointer=FIRST_MASTER, bit=64 * 32)
    settings = OffloadSettings(
        storage=(folder / f"disk{rank}",),
        transfer=TransferConfig(num_buffers=2),
        update_device=wanted,
        smartssd=SmartSSDConfig(xclbin=cards.build.xclbin, devices=[rank]),
    )
    try:
        plan = choose_update_device(settings, optimizer="SGD").cards
        found: list[str | int] = ["host"] if plan is None else [plan.cards[0].address, plan.sharers]
    except SmartInfinityError as error:
        found = [f"{type(error).__name__}: {error}"]
    return [*found, cards.counter("runs_completed", rank)]


def main() -> None:
    folder = Path(sys.argv[1])
    cards = EmulatedCards(build())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = [
        outcome(folder, cards, rank, wanted, failing=failing)
        for wanted in ("smartssd", "auto")
        for failing in (True, False)
    ]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
