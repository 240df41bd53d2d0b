"""Trains by transformers' Trainer and kills itself: ``python -m tests.huggingface.killed_worker MODEL OUT STEP``."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import transformers

from tests.huggingface.trained import train


class Die(transformers.TrainerCallback):
    """Kills the process after a step.

    Args:
        step: Number of the step.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        before=lambda trainer: trainer.add_callback(Die(int(sys.argv[3]))),
        save_strategy="steps",
        save_steps=2,
    )
