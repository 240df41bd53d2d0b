"""A fit of GPT-2 124M on two emulated cards and on the host, to the bit: ``python -m tests.xrt.long_fit --steps 3``."""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from benchmarks.gpt2 import GPT2, SIZES
from lightning_smartinfinity import SmartInfinityStrategy, SmartSSDConfig
from tests.helpers.interrupted_runs import state_digest
from tests.helpers.trainers import fit
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards


class LitGPT2(pl.LightningModule):
    """Trains on the same few random tokens; ``digest`` is that of the final state."""

    def __init__(self, size: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = GPT2(size)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        tokens = torch.randint(0, 512, (64, 32), generator=torch.Generator().manual_seed(1))
        return DataLoader(tokens, batch_size=1)  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        self.digest = state_digest(self.trainer.strategy._training_optimizer, self)


def compare(root: Path, cards: EmulatedCards, size: str, *, steps: int) -> dict[str, float]:
    """Train on both, and assert that no bit differs.

    Args:
        root: Folder for state.
        cards: Two emulated cards.
        size: One of ``SIZES``.
        steps: Number of steps.

    Returns:
        Seconds of each fit.
    """
    modules, seconds = {}, {}
    for device in ("host", "smartssd"):
        strategy = SmartInfinityStrategy(
            [root / device / "a", root / device / "b"],
            update_device=device,
            smartssd=SmartSSDConfig(xclbin=cards.build.xclbin) if device == "smartssd" else None,
            overlap="forward",
        )
        modules[device] = LitGPT2(size)
        begin = time.monotonic()
        fit(modules[device], root, strategy, max_steps=steps)
        seconds[device] = time.monotonic() - begin
        strategy.close()
    assert modules["smartssd"].losses == modules["host"].losses
    assert modules["smartssd"].digest == modules["host"].digest
    assert sum(cards.counter("runs_completed", card) for card in range(2)) > steps
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="124m")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    emulated = EmulatedCards(build())
    emulated.reset()
    with tempfile.TemporaryDirectory() as folder:
        seconds = compare(Path(folder), emulated, options.size, steps=options.steps)
    print(f"equal: {options.steps} steps of GPT-2 {options.size}, seconds {seconds}")


if __name__ == "__main__":
    main()
