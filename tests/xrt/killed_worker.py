"""Trains on two cards and is killed, or goes on to the end.

``python -m tests.xrt.killed_worker FOLDER DEVICE OVERLAP WHEN``

It resumes from ``last.ckpt``, if that is there, and saves there after every fourth step. WHEN names the moment to die:
``step:N:SECONDS`` so long after step N began, ``save:N:SECONDS`` so long after the save of step N began, or ``never``.
It saves its losses and its final state to ``end.pt``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from lightning_smartinfinity import SmartInfinityStrategy, SmartSSDConfig, TransferConfig
from tests.helpers.models import Recipe
from tests.helpers.trainers import quiet_trainer
from tests.xrt.builds import build
from tests.xrt.cards import EmulatedCards
from tests.xrt.fits import Reporting

RECIPE = Recipe(precision="bf16-mixed", depth=1, groups=True, scheduler="step", max_steps=32, skip_side_at=(1, 7))
SAVE_EVERY = 4


class Killed(Reporting):
    """Saves every few steps; ``when`` is the moment to die."""

    def __init__(self, folder: Path, when: str) -> None:
        super().__init__(RECIPE)
        self.path = folder / "last.ckpt"
        self.what, self.number, self.seconds = [*when.split(":"), "0", "0"][:3]

    def at(self, what: str) -> None:
        if (what, self.trainer.global_step) == (self.what, int(self.number)):
            timer = threading.Timer(float(self.seconds), os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()

    def on_train_batch_start(self, *_: Any) -> None:
        self.at("step")

    def on_train_batch_end(self, *_: Any) -> None:
        step = self.trainer.global_step
        if step % SAVE_EVERY == 0 and step < RECIPE.max_steps:
            self.at("save")
            self.trainer.save_checkpoint(self.path)


def main() -> None:
    folder, device, overlap, when = Path(sys.argv[1]), *sys.argv[2:5]
    route = "storage" if overlap == "forward" else "host"
    cards = EmulatedCards(build())
    cards.reset()  # two of them
    strategy = SmartInfinityStrategy(
        [folder / "ssd0", folder / "ssd1"],
        update_device=device,
        smartssd=SmartSSDConfig(xclbin=cards.build.xclbin, gradient_route=route) if device == "smartssd" else None,
        transfer=TransferConfig(tasklet_bytes=64 * 1024, num_buffers=3, keep=False),
        overlap=overlap,
    )
    module = Killed(folder, when)
    resumed = module.path if module.path.exists() else None
    trainer = quiet_trainer(folder, strategy, max_steps=RECIPE.max_steps, precision=RECIPE.precision)
    trainer.fit(module, ckpt_path=resumed)
    torch.save({"losses": module.losses, "arrays": module.arrays}, folder / "end.pt")
    strategy.close()


if __name__ == "__main__":
    main()
